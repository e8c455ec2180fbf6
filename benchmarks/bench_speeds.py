"""A rank that is slower than the others: balance of rows, learnt speeds, and the ideal split.

    python benchmarks/bench_speeds.py          # two and four CPU processes, one core slowed
    python benchmarks/bench_speeds.py --gpu    # eight processes on one GPU, with CUDA MPS
    python benchmarks/bench_speeds.py --toy    # two CPU processes, tiny, for CI

On a CPU, a process with a lower priority competes for the core of the last rank. On a GPU, the last
rank has a smaller share of the multiprocessors. Ranks learn their speeds with `speeds="auto"`. Then
three variants alternate: equal rows, the learnt speeds, and fixed speeds that follow from the
measured time per row of every rank. The last one is the ideal split. On a CPU, the other process
then ends, and the ranks forget their speeds. Every phase prints its name, and a rank that exceeds
the limit of a phase prints its stack and ends the run.

Shapes: T tokens of a rank, R ranks.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import Line, Metric, Report, options_parser
from layers import Variants, median_ratio, on_ranks, slowest
from load_cases import Shape, draw, hot
from mps import device_of_rank, phase, report_of_ranks
from timing import in_turns, print_progress

import ultraep
from ultraep import BalanceConfig
from ultraep.runtime.speeds import BLOCK

ROWS, LEARNT, IDEAL = "equal rows", 'speeds="auto"', "ideal split"
MS = Metric("step_time_p50", "ms", "ms", ".2f")
OVER = Metric("step_time_over_ideal", "ratio", "over ideal", ".3f")
GAIN = Metric("gain_over_equal_rows", "ratio", "over equal rows", ".3f")
SPEED = Metric("speed_of_the_slowest_rank", "thousandths", "slowest rank", ".0f")
MICROBATCHES = Metric("microbatches", "microbatches", "microbatches", ".0f")
SPARE = 20.0  # seconds to end all processes
COMPETE = """
import os, sys
os.nice(int(sys.argv[1]))
parent = os.getppid()
while os.getppid() == parent:
    pass
"""


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """A layer, how one rank is slowed down, and how long the ranks learn."""

    hidden: int = 1024
    ffn: int = 512
    experts: int = 16
    top_k: int = 2
    tokens: int = 512
    ranks: int = 2
    layers: int = 1
    imbalance: float = 1.3  # of the load "zipf ordered"
    nice: int = 6  # of the competing process
    percentage: int = 9  # of the multiprocessors, for the last rank; the others have an equal share
    most: int = 400  # microbatches until speeds must be found, and forgotten
    rounds: int = 9
    steps: int = 3  # timed together


CPU_SIZES = (Size(), Size(ranks=4, tokens=256, nice=3))
CARD = Size(
    hidden=4096, ffn=1536, experts=128, top_k=8, tokens=4096, ranks=8, layers=6, rounds=7, steps=2
)
LIMIT = 190.0  # seconds of a run on a GPU
TOY = Size(hidden=16, ffn=16, tokens=32, most=3, rounds=1, steps=1)


class Learning(Variants):
    """The layers of one model, which share their weights, with every kind of speeds."""

    def __init__(self, size: Size, rank: int, device: torch.device) -> None:
        super().__init__(size, rank, device, forward=True)
        self.size = size
        self.route(draw(hot(size.imbalance), size))

    def learn(self, name: str, speeds: tuple[int, ...] | str | None) -> ultraep.Balancer:
        config = BalanceConfig(objective="balance", speeds=speeds)
        balancer = ultraep.Balancer(
            dist.group.WORLD, experts=self.size.experts, slots=2, config=config, timeout=120.0
        )
        self.add(name, balancer, self.size.layers)
        return balancer

    def until(self, name: str, done: Callable[[], bool]) -> int:
        """Run steps until all ranks are `done`, or the most that the size allows."""
        for count in range(1, self.size.most + 1):
            self.step(name)
            if done():
                return count
        return self.size.most

    def measured(self, name: str) -> tuple[int, ...]:
        """Return the speed of every rank from its time per row, in thousandths of the fastest."""
        layer = self.layers[name][0]
        layer.balancer.reset_stats()
        for _ in range(BLOCK):
            self.step(name)
        seconds = layer.balancer.stats()["seconds"]["experts"]
        rows = int(self.plan(name).rank_loads[self.rank])
        of_row = layer.balancer.comm.gather_objects(seconds / max(1, rows))
        return tuple(max(10, round(1000 * min(of_row) / own)) for own in of_row)

    def seconds(self, name: str) -> float:
        return slowest(lambda: self.step(name), self.size.steps, self.device)[0]


@contextmanager
def slowed(size: Size, here: bool) -> Iterator[None]:
    """Compete for the core of this rank, if it is the slow one."""
    process = None
    if here:
        process = subprocess.Popen([sys.executable, "-c", COMPETE, str(size.nice)])
    dist.barrier()
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()
        dist.barrier()


class Phases:
    """Names and limits the phases of one rank; see `mps.phase`. CPUs have no limits."""

    def __init__(self, rank: int, end: float | None) -> None:
        self.rank, self.end = rank, end

    def __call__(self, what: str, seconds: float = 60.0) -> AbstractContextManager[None]:
        if self.end is None:
            return nullcontext()
        return phase(f"rank {self.rank}: {what}", seconds, self.end)


def open_device(rank: int, size: Size, cuda: bool) -> torch.device:
    if cuda and rank == size.ranks - 1:  # before it opens the GPU
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(size.percentage)
    device = device_of_rank(cuda=cuda)
    torch.ones(1, device=device).item()
    return device


def straggler_on_rank(rank: int, size: Size, cuda: bool, end: float | None) -> dict[str, Any]:
    last, phases = rank == size.ranks - 1, Phases(rank, end)
    say = print_progress if rank == 0 else lambda _: None
    with phases("open the device"):
        variants = Learning(size, rank, open_device(rank, size, cuda))
        balancer = variants.learn(LEARNT, "auto")
        variants.learn(ROWS, None)
    facts: dict[str, Any] = {}
    with phases("first step"):
        variants.step(LEARNT)
        variants.step(ROWS)
        torch.cuda.synchronize() if cuda else None
    with slowed(size, last and not cuda):
        with phases("learn", 90):
            facts["found"] = 1 + variants.until(LEARNT, lambda: bool(balancer.speeds))
            say(f"after {facts['found']} microbatches: {balancer.speeds or 'equal speeds'}")
        with phases("learn more"):
            for _ in range(2 * BLOCK if size.most > BLOCK else 1):
                variants.step(LEARNT)
            facts["learnt"] = balancer.speeds or (1000,) * size.ranks
        with phases("measure the time per row"):
            facts["measured"] = variants.measured(ROWS)
            say(f"learnt {facts['learnt']}, by time per row {facts['measured']}")
            variants.learn(IDEAL, facts["measured"])
        with phases("compare"):
            facts["seconds"] = in_turns([ROWS, LEARNT, IDEAL], size.rounds, variants.seconds)
            ms = {name: round(1e3 * median(times), 2) for name, times in facts["seconds"].items()}
            say(f"milliseconds {ms}")
    if not cuda:
        with phases("forget", 90):
            facts["forgotten"] = variants.until(LEARNT, lambda: not balancer.speeds)
    variants.close()
    return facts


def straggler(report: Report, size: Size, *, cuda: bool, end: float | None) -> None:
    facts = on_ranks(size.ranks, straggler_on_rank, size, cuda, end)
    seconds: dict[str, list[float]] = facts["seconds"]
    slowest_speed = {ROWS: 1000, LEARNT: min(facts["learnt"]), IDEAL: min(facts["measured"])}
    lines = [
        Line(
            {"ranks": size.ranks, "variant": name},
            {
                MS: 1e3 * median(times),
                OVER: median_ratio(times, seconds[IDEAL]),
                GAIN: median_ratio(seconds[ROWS], times),
                SPEED: slowest_speed[name],
            },
        )
        for name, times in seconds.items()
    ]
    model = f"{size.about}, {size.tokens} tokens, layers {size.layers}"
    report.add(f"EP{size.ranks}, the last rank is slow: {model}", lines)
    lines = [
        Line({"ranks": size.ranks, "speeds are": f"{name} after"}, {MICROBATCHES: facts[name]})
        for name in ("found", "forgotten")
        if name in facts
    ]
    report.add(f"EP{size.ranks}, learning", lines)


def main(argv: Sequence[str]) -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--gpu", action="store_true", help="eight processes on one GPU")
    options = parser.parse_args(argv[1:])
    cuda = options.gpu and not options.toy
    sizes = (TOY,) if options.toy else (CARD,) if cuda else CPU_SIZES
    end = time.time() + LIMIT if cuda else None
    if cuda:  # also if processes cannot be ended
        faulthandler.dump_traceback_later(LIMIT + SPARE, exit=True)
    with report_of_ranks("speeds", argv, sizes[0].ranks, cuda=cuda) as report:
        report.section = "straggler"
        for size in sizes:
            straggler(report, size, cuda=cuda, end=end)
            sys.stdout.flush()
            report.write(options.json)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv)
