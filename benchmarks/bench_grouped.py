"""Time of the grouped expert networks by rows of an expert, and of what surrounds them.

    python benchmarks/bench_grouped.py                    # needs a GPU; a minute and a half
    python benchmarks/bench_grouped.py --only partitions  # also needs cuda-python
    python benchmarks/bench_grouped.py --toy              # tiny, for CI; also without a GPU

Forward is both products and SwiGLU, backward all gradients: of rows, of weights in single precision
and of the scales of rows; what the layer launches, in bfloat16, one spare slot among the slots. A
graph is made once for each number of slots; how many rows every slot has is then written to the
device, as a plan does it. Times are medians, by events around a replay. Nothing flushes caches
between replays: weights and rows of most cases are larger than they are.

Shapes: A rows that there is room for, L slots, D model width, F hidden width.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import harness
import torch
from bench_control import captured, tell
from harness import Line, Metric, Report, Values
from torch.nn import functional

if TYPE_CHECKING:  # kernels are imported late: Triton reads its settings when they are
    from ultraep.backends.triton.grouped import Stacks

Call = Callable[[], object]
Case = dict[str, str | int | float]
Draw = Callable[..., torch.Tensor]  # of a shape
Stopwatch = Callable[[], float]  # milliseconds
PASSES = {"forward": 1, "backward": 2}  # products of every row with every weight
CALLS = 4  # in a graph of the whole card
WARMUP = 2  # replays that are not timed
CYCLES = 2_000_000  # a millisecond in which what is timed is queued before the device gets to it
SPARE_BYTES = 4 << 30  # that partitions leave to others

TIME = {p: Metric(f"{p}_time_p50", "ms", f"{p} ms", ".4f") for p in PASSES}
RATE = {p: Metric(f"{p}_rate", "TFLOP/s", "TFLOP/s", ".1f") for p in PASSES}
HOST_TIME = {p: Metric(f"{p}_host_time", "ms", f"{p} host ms", ".3f") for p in PASSES}
OVER_EQUAL = {p: Metric(f"{p}_over_equal", "ratio", f"{p[0]}. / equal", ".3f") for p in PASSES}
WORK_TIME = Metric("time_p50", "ms", "ms", ".4f")
WORK_HOST_TIME = Metric("host_time", "ms", "host ms", ".3f")
WORK_RATE = Metric("rate", "TFLOP/s", "TFLOP/s", ".1f")
WORK_BYTES = Metric("byte_rate", "GB/s", "GB/s", ".0f")


@dataclass(frozen=True, slots=True)
class Model:
    """Widths of an expert: gate and up [2F, D], down [D, F]."""

    name: str
    width: int
    ffn: int

    def flops(self, rows: int) -> int:
        """Of a forward pass."""
        return 2 * 3 * self.width * self.ffn * rows

    def bytes_of(self, slots: int, rows: int) -> int:
        """What `Mlp` holds."""
        of_row = 2 * (3 * self.width + 5 * self.ffn) + 2 * 4
        of_slot = 3 * self.width * self.ffn * (2 + 4)
        return rows * of_row + slots * of_slot


QWEN3 = Model("qwen3", 4096, 1536)
DEEPSEEK = Model("deepseek", 7168, 2048)
GLM = Model("glm", 5120, 1536)
GPT_OSS = Model("gpt-oss", 2880, 2880)
TINY = Model("tiny", 64, 32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is measured."""

    repeats: int
    curves: tuple[tuple[Model, int], ...]  # models and slots
    rows: tuple[int, ...]  # of a slot
    most_rows: int  # of all slots
    partitions: int
    sms: int  # of a partition
    partition_curves: tuple[tuple[Model, tuple[int, ...]], ...]  # models and slots: what fits first
    partition_rows: tuple[int, ...]
    skewed: Model
    skewed_rows: int
    skewed_unit: int  # rows of which every slot has a multiple
    matmul_rows: int
    matmul_widths: tuple[int, ...]
    heads: int
    head_width: int
    sequences: tuple[int, ...]
    moved: tuple[int, int]  # rows and columns of what is only read and written


FULL = Scale(
    repeats=9,
    curves=((QWEN3, 3), (QWEN3, 5), (QWEN3, 9), (DEEPSEEK, 5), (GLM, 5), (GPT_OSS, 5)),
    rows=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    most_rows=131072,
    partitions=8,
    sms=16,
    partition_curves=((QWEN3, (17,)), (DEEPSEEK, (33, 9))),
    partition_rows=(128, 512, 2048, 4096),
    skewed=QWEN3,
    skewed_rows=32768,
    skewed_unit=128,  # a tile
    matmul_rows=8192,
    matmul_widths=(4096, 5120, 7168),
    heads=64,
    head_width=128,
    sequences=(4096, 8192),
    moved=(65536, 4096),
)
QUICK = replace(
    FULL,
    repeats=5,
    curves=((QWEN3, 5), (DEEPSEEK, 5)),
    rows=(16, 128, 1024, 8192),
    partition_curves=((QWEN3, (17,)), (DEEPSEEK, (9,))),
    partition_rows=(512, 4096),
)
TOY = Scale(
    repeats=1,
    curves=((TINY, 3),),
    rows=(16, 24, 130),
    most_rows=200,
    partitions=2,
    sms=16,
    partition_curves=((TINY, (3,)),),
    partition_rows=(16,),
    skewed=TINY,
    skewed_rows=128,
    skewed_unit=16,
    matmul_rows=32,
    matmul_widths=(64,),
    heads=2,
    head_width=16,
    sequences=(32,),
    moved=(64, 64),
)
DIVISIONS = {  # shares of the slots
    "equal": (1, 1, 1, 1, 1),
    "one has half": (4, 1, 1, 1, 1),
    "1:2:4:8:16": (1, 2, 4, 8, 16),
    "one has all": (1, 0, 0, 0, 0),
}


class Gpu:
    """Timed by events of the device."""

    dtype = torch.bfloat16

    def __init__(self, repeats: int) -> None:
        self.name, self.device = torch.cuda.get_device_name(), torch.device("cuda")
        self._repeats = repeats

    def ms(self, call: Call, launches: int = 1) -> float:
        """Milliseconds of a call, the median; it is queued while the device still waits."""
        found = []
        for round_ in range(WARMUP + self._repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(CYCLES * launches)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if round_ >= WARMUP:
                found.append(begin.elapsed_time(end))
        return float(median(found))

    def stopwatch(self, call: Call) -> Stopwatch:
        """Measures one call among some in a graph."""
        graph, _ = captured(call, CALLS)
        return lambda: self.ms(graph.replay) / CALLS

    def values(self, name: str, ms: float, flops: int) -> dict[Metric, float | None]:
        return {TIME[name]: ms, RATE[name]: flops / ms / 1e9}

    def work_values(self, ms: float, flops: int, moved: int) -> Values:
        return {
            WORK_TIME: ms,
            WORK_RATE: flops / ms / 1e9 if flops else None,
            WORK_BYTES: moved / ms / 1e6 if moved else None,
        }


class Host:
    """Timed by the clock on the wall: Triton's interpreter, and torch on the CPU."""

    dtype = torch.float32  # the interpreter multiplies bfloat16 as if they were integers

    def __init__(self, repeats: int) -> None:
        self.name, self.device = "Triton interpreter", torch.device("cpu")
        self._repeats = repeats

    def ms(self, call: Call) -> float:
        seconds = []
        for _ in range(self._repeats):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return 1e3 * median(seconds)

    def stopwatch(self, call: Call) -> Stopwatch:
        return partial(self.ms, call)

    def values(self, name: str, ms: float, _: int) -> dict[Metric, float | None]:
        return {HOST_TIME[name]: ms}

    def work_values(self, ms: float, _: int, __: int) -> Values:
        return {WORK_HOST_TIME: ms}


@dataclass(frozen=True, slots=True)
class Bench:
    """What all sections share."""

    report: Report
    scale: Scale
    clock: Gpu | Host
    json: Path | None

    def table(self, title: str, lines: Sequence[Line]) -> None:
        """Print the lines and write all rows so far: what fails later takes nothing away."""
        self.report.add(title, lines)
        if self.json:
            self.report.write(self.json)


class Mlp:
    """The experts of one rank, with room for so many rows, and all that both passes need.

    `sms`: multiprocessors to fill; all of them, if not given.
    """

    def __init__(
        self,
        model: Model,
        slots: int,
        room: int,
        clock: Gpu | Host,
        *,
        sms: int | None = None,
        seed: int = 0,
    ) -> None:
        width, ffn, drawn = model.width, model.ffn, drawer(clock, seed)

        def empty(*shape: int, dtype: torch.dtype = clock.dtype) -> torch.Tensor:
            return torch.empty(shape, device=clock.device, dtype=dtype)

        self._slots, self._sms = slots, sms
        self._offsets = torch.zeros(slots + 1, dtype=torch.int32, device=clock.device)
        self._gate_up = as_stacks(drawn(slots, 2 * ffn, width).mul_(width**-0.5))
        self._down = as_stacks(drawn(slots, width, ffn).mul_(ffn**-0.5))
        self._d_gate_up = as_stacks(empty(slots, 2 * ffn, width, dtype=torch.float32))
        self._d_down = as_stacks(empty(slots, width, ffn, dtype=torch.float32))
        self._rows_AD, self._d_out_AD = drawn(room, width), drawn(room, width)
        self._served_AD = empty(room, width)  # outputs, then gradients of the rows
        self._up, self._d_up = empty(room, 2 * ffn), empty(room, 2 * ffn)
        self._hidden_AF = empty(room, ffn)
        self._scale_A = drawn(room).float()
        self._d_scale_A = empty(room, dtype=torch.float32)

    def divide(self, rows: Sequence[int]) -> None:
        """From now on, the slots have so many rows."""
        assert len(rows) == self._slots, rows
        assert sum(rows) <= len(self._rows_AD), rows
        self._offsets.copy_(torch.tensor([0, *accumulate(rows)], dtype=torch.int32))

    def forward(self) -> None:
        from ultraep.backends.triton.grouped import Grouped

        grouped = Grouped(self._offsets, programs=self._sms)
        grouped.multiply(self._rows_AD, self._gate_up, self._up)
        grouped.swiglu(self._up, self._hidden_AF)
        grouped.multiply(self._hidden_AF, self._down, self._served_AD, scale=self._scale_A)

    def backward(self) -> None:
        """Of the last forward pass with these rows."""
        from ultraep.backends.triton.grouped import Grouped

        grouped = Grouped(self._offsets, programs=self._sms)
        hidden_AF, scale_A = self._hidden_AF, self._scale_A
        grouped.multiply_transposed(self._d_out_AD, self._down, hidden_AF)
        grouped.swiglu_backward(
            self._up,
            hidden_AF,
            self._d_up,
            hidden=hidden_AF,
            scale=scale_A,
            d_scale=self._d_scale_A,
        )
        grouped.weight_gradients(self._d_out_AD, hidden_AF, self._d_down, scale=scale_A)
        grouped.weight_gradients(self._d_up, self._rows_AD, self._d_gate_up)
        grouped.multiply_transposed(self._d_up, self._gate_up, self._served_AD)

    @property
    def passes(self) -> dict[str, Call]:
        return {"forward": self.forward, "backward": self.backward}


def drawer(clock: Gpu | Host, seed: int = 0) -> Draw:
    generator = torch.Generator(device=clock.device).manual_seed(seed)
    return lambda *shape: torch.randn(
        shape, generator=generator, device=clock.device, dtype=clock.dtype
    )


def as_stacks(tensor: torch.Tensor) -> Stacks:
    """The last slot is a spare one."""
    from ultraep.backends.triton.grouped import Stacks

    return Stacks(tensor[:-1], tensor[-1:])


def stopwatches(mlp: Mlp, clock: Gpu | Host) -> dict[str, Stopwatch]:
    return {name: clock.stopwatch(call) for name, call in mlp.passes.items()}


def measured(
    bench: Bench, watches: Mapping[str, Stopwatch], flops: int
) -> dict[Metric, float | None]:
    """Both passes, in this order: backward needs what forward has left."""
    found: dict[Metric, float | None] = {}
    for name, stopwatch in watches.items():
        found |= bench.clock.values(name, stopwatch(), PASSES[name] * flops)
    return found


def grouped(bench: Bench) -> None:
    """The whole card; all slots have the same number of rows."""
    for model, slots in bench.scale.curves:
        tell(f"{model.name}, {slots} slots")
        curve(bench, model, slots)
        free()


def curve(bench: Bench, model: Model, slots: int) -> None:
    rows = [count for count in bench.scale.rows if slots * count <= bench.scale.most_rows]
    mlp = Mlp(model, slots, slots * max(rows), bench.clock)
    watches = stopwatches(mlp, bench.clock)
    lines = []
    for count in rows:
        mlp.divide([count] * slots)
        case: Case = {"model": model.name, "slots": slots, "rows": count}
        lines.append(Line(case, measured(bench, watches, model.flops(slots * count))))
    bench.table(f"whole card, D {model.width}, F {model.ffn}; rows of every slot", lines)


def skew(bench: Bench) -> None:
    """The whole card; as many rows, divided in several ways."""
    model, total, slots = bench.scale.skewed, bench.scale.skewed_rows, len(DIVISIONS["equal"])
    mlp = Mlp(model, slots, total, bench.clock)
    watches = stopwatches(mlp, bench.clock)
    lines: list[Line] = []
    for name, shares in DIVISIONS.items():
        rows = divided(total, shares, bench.scale.skewed_unit)
        mlp.divide(rows)
        values = measured(bench, watches, model.flops(total))
        equal = lines[0].values if lines else values
        case = {"model": model.name, "division": name, "rows": " ".join(map(str, rows))}
        lines.append(Line(case, values | over_equal(values, equal)))
    bench.table(f"whole card, {slots} slots; {total} rows in all", lines)


def divided(total: int, shares: Sequence[int], unit: int) -> list[int]:
    """Rows of every slot, as near to its share as multiples of a unit come.

    >>> divided(1024, (1, 2, 1), 128)
    [256, 512, 256]
    """
    units, whole = total // unit, sum(shares)
    ends = [unit * round(units * part / whole) for part in accumulate(shares)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def over_equal(values: Values, equal: Values) -> dict[Metric, float | None]:
    """How much longer than with equal slots; nothing without a GPU."""
    found: dict[Metric, float | None] = {}
    for name, metric in TIME.items():
        mine, others = values.get(metric), equal.get(metric)
        found[OVER_EQUAL[name]] = mine / others if mine and others else None
    return found


def partitions(bench: Bench) -> None:
    """As many small cards, each with weights and rows of its own, all at the same time."""
    from partitions import split

    scale = bench.scale
    parts = split(scale.partitions, scale.sms)
    streams, sms = [part.stream() for part in parts], [part.sms for part in parts]
    for model, choices in scale.partition_curves:
        slots = fitting(model, choices, max(scale.partition_rows), scale.partitions)
        tell(f"{model.name}, {slots} slots, {len(sms)} partitions of {sms[0]} SMs")
        partition_curve(bench, model, slots, streams, sms)
        free()


def partition_curve(
    bench: Bench,
    model: Model,
    slots: int,
    streams: Sequence[torch.cuda.Stream],
    sms: Sequence[int],
) -> None:
    assert isinstance(bench.clock, Gpu)
    rows, count = bench.scale.partition_rows, len(streams)
    mlps = [
        Mlp(model, slots, slots * max(rows), bench.clock, sms=size, seed=seed)
        for seed, size in enumerate(sms)
    ]
    lines = []
    for busy in (count, *halves(count)):  # the others wait: they share power and memory with these
        watches = dict(side_by_side(bench.clock, mlps[:busy], streams[:busy]))
        for each in rows if busy == count else rows[-1:]:
            for mlp in mlps:
                mlp.divide([each] * slots)
            flops = model.flops(busy * slots * each)
            case: Case = {"model": model.name, "slots": slots, "busy": busy, "rows": each}
            lines.append(Line(case, measured(bench, watches, flops)))
    about = f"{count} partitions of {sms[0]} SMs, D {model.width}, F {model.ffn}"
    bench.table(f"{about}; partitions busy, time of the slowest, TFLOP/s of all", lines)


def halves(count: int) -> list[int]:
    """Half of it, half of that, down to one."""
    return [] if count == 1 else [count // 2, *halves(count // 2)]


def fitting(model: Model, choices: Sequence[int], rows: int, count: int) -> int:
    """The first number of slots for which memory suffices, else the last."""
    room = torch.cuda.mem_get_info()[0] - SPARE_BYTES
    fits = (slots for slots in choices if count * model.bytes_of(slots, slots * rows) <= room)
    return next(fits, choices[-1])


def side_by_side(
    clock: Gpu, mlps: Sequence[Mlp], streams: Sequence[torch.cuda.Stream]
) -> Iterator[tuple[str, Stopwatch]]:
    """For either pass, what measures it on all partitions at once."""
    for name, compile_all in mlps[0].passes.items():
        compile_all()  # no kernel is loaded while another is captured
        graphs = [
            captured_on(stream, mlp.passes[name]) for stream, mlp in zip(streams, mlps, strict=True)
        ]
        yield name, partial(clock.ms, partial(replay, graphs, streams), len(graphs))


def captured_on(stream: torch.cuda.Stream, call: Call) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        call()
    return graph


def replay(graphs: Sequence[torch.cuda.CUDAGraph], streams: Sequence[torch.cuda.Stream]) -> None:
    """All graphs, each on its stream; then the current stream waits for the last of them."""
    main = torch.cuda.current_stream()
    for graph, stream in zip(graphs, streams, strict=True):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            graph.replay()
    for stream in streams:
        main.wait_stream(stream)


@dataclass(frozen=True, slots=True)
class Work:
    """Something that torch does; flops or bytes that count for it."""

    case: harness.Case
    call: Call
    flops: int = 0
    moved: int = 0


def dense(bench: Bench) -> None:
    """What surrounds the experts: products, attention, rows that are read and written."""
    lines = []
    draw = drawer(bench.clock)
    for make in (matmuls, attentions, moves):
        for work in make(bench.scale, draw):
            ms = bench.clock.ms(work.call)
            lines.append(Line(work.case, bench.clock.work_values(ms, work.flops, work.moved)))
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
    """Causal: half of the products are counted; in backward five for two of forward."""
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
    yield Work(
        {"work": "add", "size": size}, partial(torch.add, rows, more, out=out), moved=3 * nbytes
    )
    yield Work({"work": "copy", "size": size}, partial(out.copy_, rows), moved=2 * nbytes)


def free() -> None:
    """Give back all memory that nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "grouped": grouped,
    "skew": skew,
    "dense": dense,
    "partitions": partitions,
}


def run(bench: Bench, names: Sequence[str]) -> list[str]:
    """All sections, also those behind one that fails; what failed."""
    from triton.errors import TritonError

    failures = []
    for name in names:
        tell(name)
        bench.report.section = name
        try:
            SECTIONS[name](bench)
        except (RuntimeError, ImportError, TritonError) as error:
            traceback.print_exc()
            failures.append(f"{name}: {error!r}")
        free()
    return failures


def main(argv: Sequence[str]) -> None:
    """Run the sections, print their tables, and write their rows."""
    options = _options(argv[1:])
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # streams that run at once
    gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    if not gpu and not options.toy:
        raise SystemExit("a GPU is needed; without one, only --toy runs (Triton's interpreter)")
    if not gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported
    scale = TOY if options.toy else QUICK if options.quick else FULL
    clock = Gpu(scale.repeats) if gpu else Host(scale.repeats)
    report = Report("grouped", argv, device=f"{clock.name}; host {harness.cpu_device()}")
    report.header()
    names = [name for name in options.only if gpu or name != "partitions"]
    if names != options.only:
        report.note("\npartitions: needs a GPU")
    failures = run(Bench(report, scale, clock, options.json), names)
    tell("done")
    if failures:
        raise SystemExit("\n".join(failures))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    harness.common_options(parser)
    harness.section_option(parser, SECTIONS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv)
