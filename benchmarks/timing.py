"""One way to time: calls by the host's clock, and calls by events of a GPU.

`Gpu` and `Host` are the two places where a benchmark of kernels runs: on a device, or at toy size
through Triton's interpreter, whose times say nothing about a device.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep.tools.report.rows import cpu_device

Call = Callable[[], object]
Value = TypeVar("Value")
QUEUED = 2_000_000  # cycles: a millisecond in which a kernel is queued before the device gets to it
REPLAYS = 25  # of a graph of short calls
BEGAN = time.perf_counter()


def nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Timing:
    """Percentiles of the time of one call, in seconds."""

    p20: float
    p50: float
    p80: float


def time_call(call: Call, repeats: int, warmup: int, before: Call = nothing) -> Timing:
    """Time single calls by the host's clock; `before` comes before each of them, untimed."""
    seconds = []
    for _ in range(warmup + repeats):
        before()
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return Timing(*(float(p) for p in np.percentile(seconds[warmup:], (20, 50, 80))))


def device_us(
    call: Call, repeats: int, *, warmup: int = 0, before: Call = nothing, cycles: int = 0
) -> float:
    """Microseconds between two events around a call, the median.

    before: comes before each call, untimed; `torch.cuda.synchronize`: none waits for the last one.
    cycles: that the device sleeps first, so that the time in which calls are launched is hidden.
    """
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for begin, end in [*events[:1] * warmup, *events]:
        before()
        if cycles:
            torch.cuda._sleep(cycles)
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(median(1e3 * begin.elapsed_time(end) for begin, end in events))


def in_turns(
    names: Sequence[str], rounds: int, measure: Callable[[str], Value], *, warmup: int = 2
) -> dict[str, list[Value]]:
    """Measure all names in turn, each round beginning with another one.

    A machine that slows down is then as slow for one as for the others.
    """
    values: dict[str, list[Value]] = {name: [] for name in names}
    for turn in range(warmup + rounds):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            value = measure(name)
            if turn >= warmup:
                values[name].append(value)
    return values


def medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: float(median(found)) for name, found in values.items()}


def in_a_row_ms(clock: Clock, call: Call, times: int) -> float:
    """Milliseconds of a call among several that are launched as they come, without a graph."""

    def calls() -> None:
        for _ in range(times):
            call()

    us = clock.us(calls) if isinstance(clock, Host) else device_us(calls, 1)
    return us / 1e3 / times


def captured(call: Callable[[], Any], times: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of so many calls, and what the last of them returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # all kernels must be loaded before they are captured
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph, result = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        for _ in range(times):
            result = call()
    torch.cuda.synchronize()
    return graph, result


class Gpu:
    """The current GPU, timed by its events.

    repeats: calls that are timed; two more come before.
    cycles: a time in which a launch is queued before the device gets to it.
    """

    dtype = torch.bfloat16

    def __init__(self, repeats: int = 21, cycles: int = QUEUED) -> None:
        self.device = torch.device("cuda")
        self.device_name = f"{torch.cuda.get_device_name()}; host {cpu_device()}"
        self.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        self._repeats, self._cycles = repeats, cycles
        self.floors: dict[int, float] = {}  # microseconds, by number of launches

    def us(self, call: Call, before: Call = nothing, launches: int = 1) -> float:
        """Microseconds of one long call, the median; `before` comes first and is not timed."""
        cycles = self._cycles * launches
        return device_us(call, self._repeats, warmup=2, before=before, cycles=cycles)

    def replay_us(self, graph: torch.cuda.CUDAGraph, inner: int = 1) -> float:
        """Microseconds of a call, of so many in a graph; replays queue up, none is waited for."""
        return device_us(graph.replay, REPLAYS, warmup=2) / inner

    def stopwatch(self, call: Call, inner: int) -> Callable[[], float]:
        """Measures one call among some in a graph, in microseconds."""
        graph, _ = captured(call, inner)
        return lambda: self.us(graph.replay, torch.cuda.synchronize) / inner

    def floor_us(self, launches: int, inner: int) -> float:
        """Microseconds of so many kernels that do nothing, in a graph of so many such rows."""
        if launches not in self.floors:
            graph, _ = captured(self._idle, launches * inner)
            self.floors[launches] = self.replay_us(graph, inner)
        return self.floors[launches]

    @cached_property
    def _idle(self) -> Call:
        """Launches a kernel that does nothing; Triton reads its settings when it is imported."""
        import triton

        @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
        def idle(target):  # type: ignore[no-untyped-def]
            pass

        target = torch.zeros(1, dtype=torch.int32, device=self.device)
        return partial(idle[(1,)], target, num_warps=1)


class Host:
    """The host, timed by its own clock: Triton's interpreter, and torch on the CPU."""

    dtype = torch.float32  # the interpreter multiplies bfloat16 as if they were integers

    def __init__(self, repeats: int = 3, warmup: int = 1, name: str = "Triton interpreter") -> None:
        self.device = torch.device("cpu")
        self.device_name = f"{name}; host {cpu_device()}" if name else cpu_device()
        self._repeats, self._warmup = repeats, warmup

    def us(self, call: Call, before: Call = nothing, launches: int = 1) -> float:
        """Microseconds of one call, the median."""
        del launches
        return 1e6 * time_call(call, self._repeats, self._warmup, before).p50

    def stopwatch(self, call: Call, inner: int) -> Callable[[], float]:
        del inner
        return partial(self.us, call)


Clock = Gpu | Host


def on_gpu(*, toy: bool) -> bool:
    """Whether kernels run on a GPU; if not, Triton's interpreter runs them, at toy size only."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # streams that run at once
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return True
    if not toy:
        raise SystemExit("a GPU is needed; without one, only --toy runs (Triton's interpreter)")
    os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported
    torch.set_num_threads(1)
    return False


def free() -> None:
    """Give back all memory that nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def tell(what: str) -> None:
    """Say what it is at, for those who wait."""
    print(f"{time.perf_counter() - BEGAN:6.1f} s  {what}", file=sys.stderr, flush=True)


def growth_law(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Exponent of the power law through the points: least squares between logarithms.

    >>> round(growth_law([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def standard_error(values: NDArray[np.float64]) -> float:
    """Error of the median, as if values were normal, from the 20th and the 80th percentile."""
    low, high = np.percentile(values, (20, 80)).tolist()
    deviation = (high - low) / 1.683
    return float(1.253 * deviation / len(values) ** 0.5)


def one_core() -> None:
    """Pin this process to one core, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
