"""Time of the grouped expert products by rows per expert, and of the surrounding operations.

    python benchmarks/bench_grouped.py                    # needs a GPU; a minute and a half
    python benchmarks/bench_grouped.py --toy              # tiny, for CI; also without a GPU

Forward is both products and SwiGLU. Backward is all gradients: rows, weights (float32) and gates.
These are the kernels of a layer, in bfloat16, with one spare slot. A graph is captured once per
number of slots; the rows per slot are then written to the device, as a plan does. Times are medians
between events around a replay. Caches are not flushed, but most cases are larger than the caches.

Shapes: A rows of capacity, L slots, D model width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from grouped_mlp import DEEPSEEK, GLM, GPT_OSS, QWEN3, TINY, Draw, Mlp, Model, drawer
from harness import KERNELS, Bench, Case, Line, Metric, Values, main
from timing import Call, free, nothing
from torch.nn import functional

Stopwatch = Callable[[], float]  # microseconds
Counts = tuple[int, ...]
Curves = tuple[tuple[Model, int], ...]  # model and slots
PASSES = {"forward": 1, "backward": 2}  # operations per row and weight
CALLS = 4  # calls in a graph of the whole GPU
OCCUPIED = 40_000_000  # cycles, about 20 ms: longer than any of these calls

TIME = {p: Metric(f"{p}_time_p50", "ms", f"{p} ms", ".4f") for p in PASSES}
RATE = {p: Metric(f"{p}_rate", "TFLOP/s", "TFLOP/s", ".1f") for p in PASSES}
WORK_TIME = Metric("time_p50", "ms", "ms", ".4f")
WORK_RATE = Metric("rate", "TFLOP/s", "TFLOP/s", ".1f")
WORK_BYTES = Metric("byte_rate", "GB/s", "GB/s", ".0f")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What one run measures."""

    rounds: int = 9
    curves: Curves = ((QWEN3, 3), (QWEN3, 5), (QWEN3, 9), (DEEPSEEK, 5), (GLM, 5), (GPT_OSS, 5))
    rows: Counts = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # of a slot
    most_rows: int = 131072  # of all slots
    beside: Counts = (1024, 4096)
    matmul_rows: int = 8192
    matmul_widths: Counts = (4096, 5120, 7168)
    heads: int = 64
    head_width: int = 128
    sequences: Counts = (4096, 8192)
    moved: tuple[int, int] = (65536, 4096)  # rows and columns of memory-bound operations


TOY = Scale(
    rounds=1,
    curves=((TINY, 3),),
    rows=(16, 24, 130),
    most_rows=200,
    beside=(24,),
    matmul_rows=32,
    matmul_widths=(64,),
    heads=2,
    head_width=16,
    sequences=(32,),
    moved=(64, 64),
)


def measured(watches: Mapping[str, Stopwatch], flops: int) -> Values:
    """Time forward, then backward, which uses the results of forward."""
    values: dict[Metric, float | None] = {}
    for name, stopwatch in watches.items():
        us = stopwatch()
        values |= {TIME[name]: us / 1e3, RATE[name]: PASSES[name] * flops / us / 1e6}
    return values


def grouped(bench: Bench) -> None:
    """Use the whole GPU; all slots have the same number of rows."""
    for model, slots in bench.scale.curves:
        rows = [count for count in bench.scale.rows if slots * count <= bench.scale.most_rows]
        mlp = Mlp(model, slots, slots * max(rows), bench.clock)
        watches = {name: bench.clock.stopwatch(call, CALLS) for name, call in mlp.passes.items()}
        lines = []
        for count in rows:
            mlp.divide([count] * slots)
            case: Case = {"model": model.name, "slots": slots, "rows": count}
            lines.append(Line(case, measured(watches, model.flops(slots * count))))
        bench.table(f"whole GPU, D {model.width}, F {model.ffn}; rows per slot", lines)
        del mlp, watches
        free()


def beside(bench: Bench) -> None:
    """Time products alone, and beside a kernel that keeps one multiprocessor busy."""
    side = torch.cuda.Stream() if bench.on_gpu else None

    def occupy() -> None:
        if side is not None:
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(OCCUPIED)

    model, slots = bench.scale.curves[-1]
    mlp, lines = Mlp(model, slots, slots * max(bench.scale.beside), bench.clock), []
    for count in bench.scale.beside:
        mlp.divide([count] * slots)
        for where, before in (("alone", nothing), ("beside another kernel", occupy)):
            case: Case = {"model": model.name, "slots": slots, "rows": count, "products": where}
            watches = {
                name: partial(bench.clock.us, call, before) for name, call in mlp.passes.items()
            }
            lines.append(Line(case, measured(watches, model.flops(slots * count))))
    bench.table(f"D {model.width}, F {model.ffn}; rows per slot", lines)


@dataclass(frozen=True, slots=True)
class Work:
    """A torch operation, with its FLOPs or bytes."""

    case: Case
    call: Call
    flops: int = 0
    moved: int = 0


def dense(bench: Bench) -> None:
    """Time the operations around the experts: products, attention, memory-bound ones."""
    lines, draw = [], drawer(bench.clock)
    wait = torch.cuda.synchronize if bench.on_gpu else nothing
    for make in (matmuls, attentions, moves):
        for work in make(bench.scale, draw):
            us = bench.clock.us(work.call, wait)
            values = {
                WORK_TIME: us / 1e3,
                WORK_RATE: work.flops / us / 1e6 if work.flops else None,
                WORK_BYTES: work.moved / us / 1e3 if work.moved else None,
            }
            lines.append(Line(work.case, values))
    bench.table(f"{bench.clock.dtype}; GB/s count bytes read and written", lines)


def matmuls(scale: Scale, draw: Draw) -> Iterator[Work]:
    for width in scale.matmul_widths:
        rows = draw(scale.matmul_rows, width)
        weights = draw(width, width)
        out = torch.empty_like(rows)
        case = {"work": "matmul", "size": f"{scale.matmul_rows} x {width} x {width}"}
        flops = 2 * scale.matmul_rows * width * width
        yield Work(case, partial(torch.mm, rows, weights, out=out), flops=flops)


def attentions(scale: Scale, draw: Draw) -> Iterator[Work]:
    """Causal attention: half of the products count; backward counts 2.5 times forward."""
    for sequence in scale.sequences:
        shape = (1, scale.heads, sequence, scale.head_width)
        q, k, v = inputs = [draw(*shape).requires_grad_() for _ in range(3)]
        attend = partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True)
        out, d_out = attend(), draw(*shape)
        size = f"{scale.heads} heads of {scale.head_width}, {sequence} tokens"
        flops = 2 * 2 * scale.heads * scale.head_width * sequence * sequence // 2
        case = {"work": "attention", "size": size}
        yield Work(case | {"pass": "forward"}, attend, flops=flops)
        back = partial(torch.autograd.grad, out, inputs, d_out, retain_graph=True)
        yield Work(case | {"pass": "backward"}, back, flops=5 * flops // 2)


def moves(scale: Scale, draw: Draw) -> Iterator[Work]:
    rows, more = draw(*scale.moved), draw(*scale.moved)
    out, weight = torch.empty_like(rows), draw(scale.moved[1])
    size, nbytes = " x ".join(map(str, scale.moved)), rows.nbytes
    norm = partial(functional.rms_norm, rows, (scale.moved[1],), weight, 1e-6)
    yield Work({"work": "rms_norm", "size": size}, norm, moved=2 * nbytes)
    add = partial(torch.add, rows, more, out=out)
    yield Work({"work": "add", "size": size}, add, moved=3 * nbytes)
    yield Work({"work": "copy", "size": size}, partial(out.copy_, rows), moved=2 * nbytes)


SECTIONS = {"grouped": grouped, "beside": beside, "dense": dense}


if __name__ == "__main__":
    scales = {"toy": TOY, "quick": Scale(), "full": Scale()}
    main("grouped", __doc__, SECTIONS, scales, needs=KERNELS)
