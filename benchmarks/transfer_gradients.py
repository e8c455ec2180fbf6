"""Stage 8 of bench_transfer.py: gradients of copies, pulled by the home.

Shapes: H home experts, R ranks, P parameters of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from harness import Line, Metric, Mismatch, Parts, Values
from timing import Gpu, tell
from transfer_scale import RATE, TIME, Scale, TransferBench, as_replicas, board_of, tera, verdict

from ultraep import Topology
from ultraep.runtime.mapped.peers import LocalPeers

ENOUGH_OF_FLOOR = 0.70  # goal
FLOOR = Metric("floor", "us", "floor us", ".1f")
OF_FLOOR = Metric("share_of_floor", "share", "of floor", ".3f")
WALL = Metric("interpreter_time", "us", "interpreter us", ".0f")


@dataclass(frozen=True, slots=True)
class Copied:
    """Experts of rank 0 that were copied: (expert, host) of every copy, as the plan has them."""

    head: str
    name: str
    copies: tuple[tuple[int, int], ...]

    @property
    def experts(self) -> list[int]:
        return sorted({expert for expert, _ in self.copies})

    def moved(self, numbers: int, zero: bool) -> int:
        """Bytes: gradients of homes are read and written, those of copies read, and zeroed."""
        return 4 * numbers * (2 * len(self.experts) + len(self.copies) * (2 if zero else 1))


def copied_experts(scale: Scale) -> list[Copied]:
    """One expert with several copies, and several experts with one each."""
    found = [
        Copied(f"fan {fan}", f"fan_out_{fan}", tuple((0, host) for host in range(1, fan + 1)))
        for fan in scale.pull_fans
    ]
    each = tuple((expert, expert + 1) for expert in range(scale.homes))
    return [*found, Copied(f"{scale.homes} x fan 1", f"{scale.homes}_experts_fan_out_1", each)]


class Pull:
    """Rank 0 adds up the gradients of its experts that other ranks hold."""

    def __init__(self, bench: TransferBench) -> None:
        from ultraep.backends.triton.streamer import Streamer

        scale, self._clock = bench.scale, bench.clock
        ranks = 1 + max(scale.homes, *scale.pull_fans)
        group, device = LocalPeers(ranks, bench.clock.device), bench.clock.device
        topology = Topology(ranks=ranks, experts=ranks * scale.homes, slots=1)
        self._streamer = Streamer(board_of(group, 0), topology, relay="direct", programs=1)
        self._numbers, self._layout = scale.numbers, scale.layout
        self._rows = group.of(0).allocate("gradients", 4 * scale.numbers)
        self._gradient_of_host = [
            group.of(rank).allocate("gradients", 4 * scale.numbers).local.view(torch.float32)
            for rank in range(ranks)
        ]
        self._gradients_HP = torch.zeros(scale.homes, scale.numbers, device=device)
        self._fresh_HP = torch.randn(scale.homes, scale.numbers, device=device)
        self._fresh_RP = torch.randn(ranks, scale.numbers, device=device)
        self._made = torch.zeros(self._streamer.size, dtype=torch.int32, device=device)

    def plan(self, copied: Copied) -> None:
        """What is pulled from now on."""
        self._copied = copied
        rows = [(*copy, 0) for copy in copied.copies]
        replicas_C3 = as_replicas(rows, self._streamer.copies, self._made.device)
        self._streamer.schedule(replicas_C3, self._layout, self._made)
        self._want_HP = self._fresh_HP.clone()
        for expert, host in copied.copies:
            self._want_HP[expert] += self._fresh_RP[host]

    def time(self, programs: int, zero: bool) -> float:
        """Microseconds of a pull; what the last one added up is compared."""
        from ultraep.backends.triton.reducer import pull

        given = self._gradients_HP, self._rows, self._made, self._streamer
        call = partial(pull, *given, programs=programs, zero=zero)
        us = self._clock.us(call, self._renew)
        self._check(zero)
        return us

    def _renew(self) -> None:
        """Gradients as they were before the first pull."""
        for expert in self._copied.experts:
            self._gradients_HP[expert].copy_(self._fresh_HP[expert])
        for _, host in self._copied.copies:
            self._gradient_of_host[host].copy_(self._fresh_RP[host])

    def _check(self, zero: bool) -> None:
        for expert in self._copied.experts:
            if not torch.equal(self._gradients_HP[expert], self._want_HP[expert]):
                raise Mismatch(f"the gradient of expert {expert}: {self._copied.head}")
        for _, host in self._copied.copies:
            left = self._gradient_of_host[host]
            if not (bool((left == 0).all()) if zero else torch.equal(left, self._fresh_RP[host])):
                raise Mismatch(f"the gradient that rank {host} holds: {self._copied.head}")


# Microseconds by copies, whether zeros are left behind, and programs.
Pulls = dict[tuple[Copied, bool, int], float]


def reduce(bench: TransferBench) -> None:
    """Gradients of copies, pulled by the home and added in fixed order."""
    scale, clock = bench.scale, bench.clock
    if not isinstance(clock, Gpu):
        us = _pulls(bench, scale.pull_programs)
        bench.table("reduce: gradients, pulled", _interpreted(us))
        return
    shipped = 4 * clock.multiprocessors  # that the data plane starts
    settings = sorted({*scale.pull_programs, shipped})
    us = _pulls(bench, settings)
    for zero in (False, True):
        title = "reduce: share of the floor" + (", when zeros are left behind" if zero else "")
        bench.table(title, _pull_sweep(bench, us, settings, zero))
    lines = _pull_choices(bench, us, settings, shipped)
    bench.table("reduce: as shipped, and the best of the sweep", lines)
    worst = {
        name: min(line.values[OF_FLOOR] or 0.0 for line in lines if line.case["setting"] == name)
        for name in ("shipped", "best")
    }
    reached = [
        f"{name} {share:.3f} at worst, {verdict(share >= ENOUGH_OF_FLOOR)}"
        for name, share in worst.items()
    ]
    bench.report.note(
        f"fan 4: 4 copies of one expert of {scale.numbers / 1e6:.1f} M numbers, fp32. Floor: the "
        "gradients of copies read, those of homes read and written, zeros written, at the rate of "
        f"the copy, {tera(bench.copy_rate)}.\n"
        f"Goal {ENOUGH_OF_FLOOR} of the floor: {'; '.join(reached)}."
    )


def _pulls(bench: TransferBench, settings: Sequence[int]) -> Pulls:
    pull, us = Pull(bench), {}
    for copied in copied_experts(bench.scale):
        tell(f"reduce: {copied.head}")
        pull.plan(copied)
        for zero, setting in product((False, True), settings):
            us[copied, zero, setting] = pull.time(setting, zero)
    return us


def _pull_case(zero: bool, programs: int) -> Parts:
    from ultraep.backends.triton.reducer import AHEAD, NUMBERS, WARPS

    tile = f"{NUMBERS} numbers, {WARPS} warps, {AHEAD} ahead"
    return {"zeros": "yes" if zero else "no", "tile": tile, "programs": programs}


def _interpreted(us: Pulls) -> list[Line]:
    return [
        Line({"copies": copied.head} | _pull_case(zero, setting), {WALL: took})
        for (copied, zero, setting), took in us.items()
    ]


def _pull_sweep(bench: TransferBench, us: Pulls, settings: Sequence[int], zero: bool) -> list[Line]:
    """A line for every setting, a column for every number of copies."""
    lines = []
    for setting in settings:
        values: dict[Metric, float | None] = {}
        for copied in copied_experts(bench.scale):
            metric = Metric(f"share_of_floor_{copied.name}", "share", copied.head, ".3f")
            floor = copied.moved(bench.scale.numbers, zero) / bench.copy_rate
            values[metric] = floor / us[copied, zero, setting]
        lines.append(Line(_pull_case(zero, setting), values))
    return lines


def _pull_choices(
    bench: TransferBench, us: Pulls, settings: Sequence[int], shipped: int
) -> list[Line]:
    lines = []
    for copied, zero in product(copied_experts(bench.scale), (False, True)):
        moved = copied.moved(bench.scale.numbers, zero)
        floor = moved / bench.copy_rate
        times = {setting: us[copied, zero, setting] for setting in settings}
        best = min(times, key=times.__getitem__)
        for name, setting in (("shipped", shipped), ("best", best)):
            took = times[setting]
            case: Parts = {"copies": copied.head, "setting": name}
            values: Values = {
                TIME: took,
                RATE: moved / took / 1e6,
                FLOOR: floor,
                OF_FLOOR: floor / took,
            }
            lines.append(Line(case | _pull_case(zero, setting), values))
    return lines
