"""Timing of calls, by the clock of the host or by events of a GPU.

Kernels run on a `Gpu`, or at toy size on a `Host` through Triton's interpreter, whose times say
nothing about a GPU.
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
from measured import cpu_device

Call = Callable[[], object]
Value = TypeVar("Value")
QUEUED = 2_000_000  # cycles, about 1 ms: the device sleeps while the host queues a kernel
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
    """Time single calls by the clock of the host; `before` runs before each one, untimed."""
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
    """Median microseconds between two events around a call.

    before: runs before each call, untimed; with `torch.cuda.synchronize` calls do not queue up.
    cycles: the device sleeps this long first, which hides the launch.
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
    """Measure all names in turn; each round begins with another one.

    A machine that slows down then slows down all of them.
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
    return {name: float(median(samples)) for name, samples in values.items()}


def in_a_row_ms(clock: Clock, call: Call, times: int) -> float:
    """Milliseconds per call of several eager calls in a row."""

    def calls() -> None:
        for _ in range(times):
            call()

    us = clock.us(calls) if isinstance(clock, Host) else device_us(calls, 1)
    return us / 1e3 / times


def alternating_ms(
    clock: Clock, calls: Mapping[str, Call], rounds: int, times: int, *, warmup: int = 0
) -> dict[str, float]:
    """Median milliseconds per call of every variant; variants alternate, `times` calls each."""
    measure = lambda name: in_a_row_ms(clock, calls[name], times)  # noqa: E731
    return medians(in_turns(list(calls), rounds, measure, warmup=warmup))


def captured(call: Callable[[], Any], times: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a graph of this many calls, and the result of the last one."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # loads all kernels before the capture
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

    repeats: timed calls, after two that are not timed.
    cycles: the device sleeps this long while the host queues a launch.
    """

    dtype = torch.bfloat16

    def __init__(self, repeats: int = 21, cycles: int = QUEUED) -> None:
        self.device = torch.device("cuda")
        self.device_name = f"{torch.cuda.get_device_name()}; host {cpu_device()}"
        self.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        self._repeats, self._cycles = repeats, cycles
        self.floors: dict[int, float] = {}  # microseconds, by number of launches

    def us(self, call: Call, before: Call = nothing, launches: int = 1) -> float:
        """Median microseconds of one long call; `before` runs first, untimed."""
        cycles = self._cycles * launches
        return device_us(call, self._repeats, warmup=2, before=before, cycles=cycles)

    def replay_us(self, graph: torch.cuda.CUDAGraph, inner: int = 1) -> float:
        """Microseconds per call in a graph of `inner` calls; replays queue up."""
        return device_us(graph.replay, REPLAYS, warmup=2) / inner

    def stopwatch(self, call: Call, inner: int) -> Callable[[], float]:
        """Return a function that measures one of `inner` calls in a graph, in microseconds."""
        graph, _ = captured(call, inner)
        return lambda: self.us(graph.replay, torch.cuda.synchronize) / inner

    def floor_us(self, launches: int, inner: int) -> float:
        """Microseconds of this many empty kernels, in a graph of `inner` such groups."""
        if launches not in self.floors:
            graph, _ = captured(self._idle, launches * inner)
            self.floors[launches] = self.replay_us(graph, inner)
        return self.floors[launches]

    @cached_property
    def _idle(self) -> Call:
        """Launch an empty kernel. Triton is imported late, because it then reads its settings."""
        import triton

        @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
        def idle(target):  # type: ignore[no-untyped-def]
            pass

        target = torch.zeros(1, dtype=torch.int32, device=self.device)
        return partial(idle[(1,)], target, num_warps=1)


class Host:
    """The host, timed by its own clock: Triton's interpreter or torch on the CPU."""

    dtype = torch.float32  # the interpreter multiplies bfloat16 as integers

    def __init__(self, repeats: int = 3, warmup: int = 1, name: str = "Triton interpreter") -> None:
        self.device = torch.device("cpu")
        self.device_name = f"{name}; host {cpu_device()}" if name else cpu_device()
        self._repeats, self._warmup = repeats, warmup

    def us(self, call: Call, before: Call = nothing, launches: int = 1) -> float:
        """Median microseconds of one call."""
        del launches
        return 1e6 * time_call(call, self._repeats, self._warmup, before).p50

    def stopwatch(self, call: Call, inner: int) -> Callable[[], float]:
        del inner
        return partial(self.us, call)


Clock = Gpu | Host


def on_gpu(*, toy: bool) -> bool:
    """Whether kernels run on a GPU; otherwise Triton's interpreter runs them, at toy size only."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # streams that run at once
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return True
    if not toy:
        raise SystemExit("this benchmark needs a GPU; pass --toy to use Triton's interpreter")
    os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported
    torch.set_num_threads(1)
    return False


def free() -> None:
    """Free all unused memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def print_progress(text: str) -> None:
    """Print the time since the start and this text on stderr."""
    print(f"{time.perf_counter() - BEGAN:6.1f} s  {text}", file=sys.stderr, flush=True)


def one_core() -> None:
    """Pin this process to one core, if the system supports it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
