"""Stage 6 of one rank, launch by launch: section `kernels` of bench_single.py.

Shapes: A rows, D model width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from harness import Bench, Line, Metric, Values
from single_contenders import Inputs, name_of
from timing import Clock, Host, free

if TYPE_CHECKING:  # kernels are imported late: Triton reads its settings when they are
    from ultraep.backends.triton.blocks import Table

FLOPS, BYTES = 800e12, 4.3e12  # that an H200 reaches in a second: large products, copies
TIME = Metric("time_p50", "ms", "ms", ".4f")
HOST_TIME = Metric("host_time", "ms", "host ms", ".2f")
FLOOR = Metric("floor", "ms", "floor", ".4f")
OF_FLOOR = Metric("floor_over_time", "ratio", "floor / ms", ".3f")


@dataclass(frozen=True)
class Launch:
    """A part of stage 6, with the least that it must do."""

    work: str
    call: Callable[[], object]
    flops: int
    moved: int


def kernels(bench: Bench) -> None:
    """Every launch of stage 6, beside the time in which operations or bytes could be done."""
    from ultraep.backends.triton.blocks import capability_of, table_for
    from ultraep.backends.triton.device import default_device

    table = table_for(*capability_of(default_device()))
    for shape in bench.scale.shapes:
        inputs, lines = Inputs.of_tokens(shape, bench.clock), []
        for launch in launches(inputs, table):
            case = {"shape": name_of(shape), "work": launch.work}
            lines.append(Line(case, launch_values(bench.clock, launch)))
        bench.table(f"stage 6; floor at {FLOPS:.0e} FLOP/s and {BYTES:.1e} B/s", lines)
        free()


def launch_values(clock: Clock, launch: Launch) -> Values:
    if isinstance(clock, Host):
        return {HOST_TIME: clock.us(launch.call) / 1e3}
    ms = clock.us(launch.call, torch.cuda.synchronize) / 1e3
    floor = 1e3 * max(launch.flops / FLOPS, launch.moved / BYTES)
    return {TIME: ms, FLOOR: floor, OF_FLOOR: floor / ms}


def launches(inputs: Inputs, blocks: Table) -> Iterator[Launch]:
    """What the layer launches, in its order; gradients of weights also rounded on the way."""
    from ultraep.backends.triton.grouped import Grouped
    from ultraep.ops.products import Stacks

    shape, x = inputs.shape, inputs.x
    counts = torch.bincount(inputs.ids.flatten(), minlength=shape.experts)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    run, A, D, F = Grouped(offsets, table=blocks), shape.rows, shape.hidden, shape.ffn
    weights = {name: Stacks(w, w[:0]) for name, w in inputs.weights.items()}
    gate_up, down = weights["gate_up_proj"], weights["down_proj"]
    rows, out = x.repeat(shape.top_k, 1), x.new_empty(A, D)
    up, d_up, hidden, d_hidden = (x.new_empty(A, width * F) for width in (2, 2, 1, 1))
    scale, dots = (x.new_ones(A, dtype=torch.float32) for _ in range(2))
    product, nbytes = 2 * A * D * F, x.element_size()
    read, of_D, of_F = shape.experts * D * F * nbytes, A * D * nbytes, A * F * nbytes

    def launch(work: str, call: Callable[..., object], *args: Any, **options: Any) -> Launch:
        flops, moved = options.pop("flops", 0), options.pop("moved")
        return Launch(work, partial(call, *args, **options), flops, moved)

    both = {"flops": 2 * product, "moved": 2 * read + of_D + 2 * of_F}
    one = {"flops": product, "moved": read + of_D + of_F}
    yield launch("gate_up", run.multiply, rows, gate_up, up, **both)
    yield launch("swiglu", run.swiglu, up, hidden, moved=3 * of_F)
    yield launch("down", run.multiply, hidden, down, out, scale=scale, **one)
    yield launch("d_hidden", run.multiply_transposed, rows, down, d_hidden, **one)
    back = {"hidden": hidden, "scale": scale, "d_scale": dots, "moved": 6 * of_F}
    yield launch("swiglu_backward", run.swiglu_backward, up, d_hidden, d_up, **back)
    yield launch("d_rows", run.multiply_transposed, d_up, gate_up, out, **both)
    single = {name: w.homes.float() for name, w in weights.items()}
    for kind, of in (("single", single), ("rounded", inputs.weights)):
        size = next(iter(of.values())).element_size()
        into = {name: Stacks(torch.empty_like(w), w[:0].float()) for name, w in of.items()}
        for name, d_out, seen, cost in (
            ("down_proj", rows, hidden, one),
            ("gate_up_proj", d_up, rows, both),
        ):
            moved = cost["moved"] + (size - nbytes) * into[name].homes.numel()
            named = f"d_{name.removesuffix('_proj')}, {kind}"
            options = {"flops": cost["flops"], "moved": moved}
            yield launch(named, run.weight_gradients, d_out, seen, into[name], **options)
    moved = sum(w.numel() for w in single.values()) * (4 + nbytes)
    yield launch("to the type of weights", as_type, list(single.values()), x.dtype, moved=moved)


def as_type(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [tensor.to(dtype) for tensor in tensors]
