"""One rank alone: a whole MoE layer beside a plain one of torch, forward and backward.

    python benchmarks/bench_single.py                  # needs a GPU; a minute
    python benchmarks/bench_single.py --only kernels   # stage 6, launch by launch
    python benchmarks/bench_single.py --toy            # tiny, for CI; also without a GPU

Ids and gates are given, so that no router is timed. In one run, on the same weights:

    torch, index_add   rows sorted by expert, `torch._grouped_mm`, sums by index_add
    torch, gathers     the same, but every sum over choices gathers its rows
    messages           our layer, on the path that sends messages
    mapped             our layer, on the path without the host

Outputs and all gradients are compared before anything is timed. Contenders take turns; a round is
some steps in a row, between two events; the median of the rounds counts. What all are compared with
is the quicker one of the two torch layers.

Shapes: T tokens, K experts per token, E experts, A = T * K rows, D model width, F hidden width.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest import mock

import harness
import torch
from bench_control import tell
from bench_grouped import Gpu, Host, free
from harness import Line, Metric, Report, Values
from torch import nn
from torch.nn.functional import silu

import ultraep
from ultraep.experts import Experts

if TYPE_CHECKING:  # kernels are imported late: Triton reads its settings when they are
    from ultraep.backends.triton.grouped import Table

Clock = Gpu | Host
Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # tokens and gates to outputs
FLOPS, BYTES = 800e12, 4.3e12  # that an H200 reaches in a second: large products, copies

STEP = Metric("step_time_p50", "ms", "ms", ".3f")
SPEED = Metric("speed_over_torch_grouped", "ratio", "speed", ".3f")
HOST_STEP = Metric("step_host_time", "ms", "host ms", ".2f")
SPENT = Metric("device_time", "ms", "ms of a step", ".4f")
CALLS = Metric("calls", "launches", "calls", ".1f")
TIME = Metric("time_p50", "ms", "ms", ".4f")
HOST_TIME = Metric("host_time", "ms", "host ms", ".2f")
FLOOR = Metric("floor", "ms", "floor", ".4f")
OF_FLOOR = Metric("floor_over_time", "ratio", "floor / ms", ".3f")


@dataclass(frozen=True)
class Shape:
    """A layer and what it gets."""

    hidden: int
    ffn: int
    experts: int
    top_k: int
    tokens: int = 8192

    @property
    def name(self) -> str:
        return f"{self.hidden}/{self.ffn}/{self.experts}/{self.top_k}"

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k


SHAPES = (Shape(2048, 768, 128, 8), Shape(4096, 1536, 16, 8), Shape(2880, 2880, 32, 4))
TOY = (Shape(32, 16, 4, 2, tokens=24),)


@dataclass(frozen=True)
class Bench:
    """What all sections share."""

    report: Report
    shapes: Sequence[Shape]
    clock: Clock
    rounds: int
    steps: int  # of a round
    json: Path | None

    def table(self, title: str, lines: Sequence[Line]) -> None:
        """Print the lines and write all rows so far: what fails later takes nothing away."""
        self.report.add(title, lines)
        if self.json:
            self.report.write(self.json)


class Inputs:
    """Tokens, choices, gates and weights of one shape, and the gradient of the outputs."""

    def __init__(self, shape: Shape, clock: Clock) -> None:
        generator = torch.Generator(device=clock.device).manual_seed(0)
        options: dict[str, Any] = {"generator": generator, "device": clock.device}
        drawn = partial(torch.randn, dtype=clock.dtype, **options)
        self.shape = shape
        self.x, self.dy = (drawn(shape.tokens, shape.hidden) for _ in range(2))
        scores = torch.rand(shape.tokens, shape.experts, **options)
        best, self.ids = scores.topk(shape.top_k, dim=1)
        self.gates = best / best.sum(dim=1, keepdim=True)
        gate_up = drawn(shape.experts, 2 * shape.ffn, shape.hidden).mul_(shape.hidden**-0.5)
        down = drawn(shape.experts, shape.hidden, shape.ffn).mul_(shape.ffn**-0.5)
        self.weights = {"gate_up_proj": gate_up, "down_proj": down}


class Contender:
    """A layer with leaves of its own over the same numbers."""

    def __init__(self, inputs: Inputs, make: Callable[[Inputs, Mapping[str, Any]], Layer]) -> None:
        self._dy = inputs.dy
        self._x, self._gates = (t.detach().requires_grad_() for t in (inputs.x, inputs.gates))
        weights = {name: nn.Parameter(tensor) for name, tensor in inputs.weights.items()}
        self._leaves = {"x": self._x, "gates": self._gates, **weights}
        self._layer = make(inputs, weights)

    def step(self) -> torch.Tensor:
        for leaf in self._leaves.values():
            leaf.grad = None
        y = self._layer(self._x, self._gates)
        y.backward(self._dy)
        return y.detach()

    def results(self) -> dict[str, torch.Tensor]:
        """The outputs of a step, and the gradients of all that it was given."""
        found = {"outputs": self.step().clone()}
        for name, leaf in self._leaves.items():
            assert leaf.grad is not None, name
            found[f"gradient of {name}"] = leaf.grad.clone()
            leaf.grad = None
        return found


class Gathered(torch.autograd.Function):
    """Rows of tokens in the order of experts; the sum over choices gathers what comes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.shape = len(x), -1, x.shape[1]
        return x.index_select(0, order // (len(order) // len(x)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradients[0].index_select(0, back).view(ctx.shape).sum(dim=1), None, None


class Permuted(torch.autograd.Function):
    """Rows in another order, and their gradients in the old one."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradients[0].index_select(0, back), None, None


def with_torch(inputs: Inputs, weights: Mapping[str, Any], *, gathers: bool) -> Layer:
    """The layer that torch alone gives."""
    gate_up, down = (weights[name].mT for name in ("gate_up_proj", "down_proj"))
    every = torch.arange(inputs.shape.experts, device=inputs.ids.device)

    def experts(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        gate, value = torch._grouped_mm(rows, gate_up, offs=ends).chunk(2, dim=-1)
        return torch._grouped_mm(silu(gate) * value, down, offs=ends)

    def layer(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        chosen, order = inputs.ids.flatten().sort(stable=True)
        ends = torch.searchsorted(chosen, every, right=True, out_int32=True)
        gates = gates.to(x.dtype)
        if not gathers:
            token = order // inputs.shape.top_k
            outputs = experts(x.index_select(0, token), ends) * gates.flatten()[order, None]
            return torch.zeros_like(x).index_add(0, token, outputs)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        outputs = experts(apply(Gathered, x, order, back), ends)
        choices = apply(Permuted, outputs, back, order).view(*gates.shape, -1)
        return torch.bmm(gates[:, None], choices).squeeze(1)

    return layer


def apply(function: Any, *args: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = function.apply(*args)
    return found


def with_ultraep(inputs: Inputs, weights: Mapping[str, Any], *, path: str) -> Layer:
    """Our layer; the one place that knows how a path is asked for."""
    shape, device = inputs.shape, inputs.x.device
    balancer: Any
    if path == "mapped":
        from ultraep.runtime.device import DeviceBalancer
        from ultraep.runtime.peers import LocalPeers

        balancer = DeviceBalancer(
            LocalPeers(1, device).of(0),
            experts=shape.experts,
            tokens=shape.tokens,
            top_k=shape.top_k,
        )
    else:
        balancer = ultraep.Balancer(None, experts=shape.experts)
    with mock.patch.object(Experts, "_draw"):  # the weights are given
        moe: Any = ultraep.BalancedMoE(
            shape.hidden,
            shape.ffn,
            shape.experts,
            shape.top_k,
            balancer=balancer,
            dtype=inputs.x.dtype,
            device=device,
        )
    for name, weight in weights.items():
        setattr(moe.experts, name, weight)
    moe.router = Given(inputs.ids)

    def layer(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        moe.router.gates = gates
        y: torch.Tensor = moe(x)
        return y

    return layer


class Given(nn.Module):
    """A router whose choices and gates are given."""

    def __init__(self, ids: torch.Tensor) -> None:
        super().__init__()
        self.ids = ids
        self.gates: Any = None

    def forward(self, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids, self.gates


CONTENDERS: dict[str, Callable[..., Layer]] = {
    "torch, index_add": partial(with_torch, gathers=False),
    "torch, gathers": partial(with_torch, gathers=True),
    "messages": partial(with_ultraep, path="messages"),
    "mapped": partial(with_ultraep, path="mapped"),
}
PLAIN = tuple(CONTENDERS)[:2]


def compare(contenders: Mapping[str, Contender], dtype: torch.dtype) -> None:
    """Stop where a contender computes something else than the first one."""
    most = 2e-2 if dtype == torch.bfloat16 else 1e-5
    wanted: dict[str, torch.Tensor] = {}
    for name, contender in contenders.items():
        found = contender.results()
        wanted = wanted or found
        for what, tensor in found.items():
            error = distance(tensor, wanted[what])
            if not error <= most:
                raise SystemExit(f"{what} of {name!r} differ by {error:.2e}, at most {most:.0e}")


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference, over that of what is wanted."""
    difference = torch.linalg.vector_norm(found.float() - wanted.float())
    return float(difference / torch.linalg.vector_norm(wanted.float()))


def layer(bench: Bench) -> None:
    """Milliseconds of a step, and speed beside the quicker layer of torch."""
    lines = []
    for shape in bench.shapes:
        tell(shape.name)
        inputs = Inputs(shape, bench.clock)
        contenders = {name: Contender(inputs, make) for name, make in CONTENDERS.items()}
        compare(contenders, bench.clock.dtype)
        times = timed(bench, contenders)
        plain = min(times[name] for name in PLAIN)
        for name, ms in times.items():
            values: Values = {STEP: ms, SPEED: plain / ms}
            if isinstance(bench.clock, Host):
                values = {HOST_STEP: ms}
            lines.append(Line({"shape": shape.name, "path": name}, values))
        del contenders
        free()
    about = f"EP1, {bench.shapes[0].tokens} tokens, forward and backward, {bench.clock.dtype}"
    bench.table(f"{about}; shape D/F/experts/top-k", lines)


def timed(bench: Bench, contenders: Mapping[str, Contender]) -> dict[str, float]:
    """Milliseconds of a step of each, the median of the rounds in which they take turns."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for round_ in range(bench.rounds):  # all are warm: they were compared
        for name in names if round_ % 2 else reversed(names):  # none is always the first
            found[name].append(in_a_row(bench.clock, contenders[name].step, bench.steps))
    return {name: float(median(times)) for name, times in found.items()}


def in_a_row(clock: Clock, call: Callable[[], object], times: int) -> float:
    """Milliseconds of a call among some, launched as they come: eager."""
    if isinstance(clock, Host):
        return clock.ms(call)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / times


def profile(bench: Bench) -> None:
    """Where the device's time of a step goes: kernels of our layer without the host."""
    from torch.profiler import ProfilerActivity

    if isinstance(bench.clock, Host):
        bench.report.note("\nprofile: needs a GPU")
        return
    for shape in bench.shapes:
        inputs = Inputs(shape, bench.clock)
        contender = Contender(inputs, CONTENDERS["mapped"])
        contender.step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(bench.steps):
                contender.step()
            torch.cuda.synchronize()
        kernels = [event for event in seen.key_averages() if event.self_device_time_total > 0]
        kernels.sort(key=lambda event: -event.self_device_time_total)
        lines = []
        for place, event in enumerate(kernels[:24]):
            case = {"shape": shape.name, "place": place, "kernel": event.key[:60]}
            ms = event.self_device_time_total / 1e3 / bench.steps
            lines.append(Line(case, {SPENT: ms, CALLS: event.count / bench.steps}))
        bench.table("mapped", lines)
        del contender
        free()


@dataclass(frozen=True)
class Launch:
    """A part of stage 6, with the least that it must do."""

    work: str
    call: Callable[[], object]
    flops: int
    moved: int


def kernels(bench: Bench) -> None:
    """Every launch of stage 6, beside the time in which operations or bytes could be done."""
    from ultraep.backends.triton.grouped import TABLES

    table = TABLES["cuda" if torch.version.hip is None else "hip"]
    tables = {"as set": table, "narrow": {k: replace(b, narrow=True) for k, b in table.items()}}
    for shape in bench.shapes:
        inputs, lines = Inputs(shape, bench.clock), []
        for tiles, blocks in tables.items():
            for launch in launches(inputs, blocks):
                if tiles == "narrow" and not launch.flops:
                    continue
                case = {"shape": shape.name, "tiles": tiles, "work": launch.work}
                lines.append(Line(case, launch_values(bench.clock, launch)))
        bench.table(f"stage 6; floor at {FLOPS:.0e} FLOP/s and {BYTES:.1e} B/s", lines)
        free()


def launch_values(clock: Clock, launch: Launch) -> Values:
    ms = clock.ms(launch.call)
    if isinstance(clock, Host):
        return {HOST_TIME: ms}
    floor = 1e3 * max(launch.flops / FLOPS, launch.moved / BYTES)
    return {TIME: ms, FLOOR: floor, OF_FLOOR: floor / ms}


def launches(inputs: Inputs, blocks: Table) -> Iterator[Launch]:
    """What the layer launches, in its order; gradients of weights also rounded on the way."""
    from ultraep.backends.triton.grouped import Grouped, Stacks

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


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "layer": layer,
    "profile": profile,
    "kernels": kernels,
}


def main(argv: Sequence[str]) -> None:
    """Run the sections, print their tables, and write their rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    harness.common_options(parser)
    harness.section_option(parser, SECTIONS)
    options = parser.parse_args(argv[1:])
    gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    if not gpu and not options.toy:
        raise SystemExit("a GPU is needed; without one, only --toy runs (Triton's interpreter)")
    if not gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported
    rounds = 1 if options.toy else 5 if options.quick else 15
    clock = Gpu(rounds) if gpu else Host(1)
    report = Report("single", argv, device=f"{clock.name}; host {harness.cpu_device()}")
    report.header()
    shapes = TOY if options.toy else SHAPES
    bench = Bench(report, shapes, clock, rounds, 1 if options.toy else 5, options.json)
    for name in options.only:
        report.section = name
        SECTIONS[name](bench)
        free()


if __name__ == "__main__":
    main(sys.argv)
