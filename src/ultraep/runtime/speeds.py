"""Speeds that a balancer learns: `BalanceConfig(speeds="auto")`.

Every rank divides the time of stage 6 by the time that the measured rates predict for its groups of
rows, and averages this *pace* over a block of microbatches. After every block the hosts of all
ranks exchange their paces in one message, compute the speeds from the same integers, and plan with
them from the same microbatch on.

Other programs slow a CPU down for seconds, so its blocks are not independent. The median pace of
the blocks of several seconds is a *span*; a GPU belongs to one job, and its spans are shorter. The
speed of a rank changes only if several spans in a row agree and the change exceeds the noise
between spans; plans use it only if that saves time.

Microbatches are counted in the first layer, so one count is one pass through the model.

Shapes: R ranks, E experts, G groups of rows.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from statistics import fmean, median_high
from time import monotonic
from typing import TypeAlias

import numpy as np
from torch.optim.optimizer import register_optimizer_step_post_hook

from ultraep.arrays import IntArray
from ultraep.config import NOMINAL_SPEED, PARTS
from ultraep.passes import FORWARD, Passes, PassRecord
from ultraep.plan import Plan
from ultraep.runtime.cost import CostModel

BLOCK = 32  # microbatches
LEARNT_RANGE, LEARNT_UNIT = (100, 4_000), 10  # of speeds
REMEMBERED = 64  # microbatches of a layer; more hardly wait for backward at the same time
# Seconds, at least, and at least a block. Speeds change at most once in a span.
SPAN, SPAN_OF_CPU = 0.5, 4.0
AGREEING = 5  # spans in a row that show a change
FEWEST, KEPT = 5, 16  # spans from which the noise is estimated
SAMPLES, ENOUGH = 3, 32  # of a block that counts, at least; about as many are taken
CUT = 8  # an eighth of the samples of a block is left out at each end
CHANGE, OF_NOISE = 20, 3  # least change of a speed: in thousandths, and as a multiple of the noise
# Time that a plan loses to the ideal split, in millionths: to leave equal speeds, to adjust unequal
# ones, and to return to equal ones.
LEAVE, ADJUST, RETURN = 30_000, 20_000, 15_000
SILENT = 5 * BLOCK  # microbatches without a sample before a warning

Numbers: TypeAlias = tuple[int, ...]  # one for each rank
logger = logging.getLogger(__name__)


class _OptimizerSteps:
    """Counts the steps of all torch optimizers."""

    total = 0

    def __call__(self, *_: object) -> None:
        self.total += 1


optimizer_steps = _OptimizerSteps()


@cache
def count_optimizer_steps() -> None:
    """Start to count optimizer steps, for the rest of the process."""
    register_optimizer_step_post_hook(optimizer_steps)


class SafePoints:
    """Finds microbatches at which plans may change: backward must recompute with the first plan.

    Plans may change after an optimizer step that has seen every pass of a recomputed layer twice.
    They may always change while nothing is recomputed.
    """

    def __init__(self) -> None:
        self._steps = optimizer_steps.total
        self._recomputed: set[int] = set()  # layers
        self._pending: Counter[int] = Counter()  # passes of a layer since the last step
        self._forwards: Counter[int] = Counter()  # the same since the last recomputation

    def begin(self, passes: Passes) -> bool:
        """Note that a microbatch begins; return whether its plan may differ from earlier ones."""
        layer, finished = passes.layer, False
        if self._steps != optimizer_steps.total:
            finished = bool(self._recomputed) and not any(
                self._pending[recomputed] for recomputed in self._recomputed
            )
            self._steps = optimizer_steps.total
            self._pending.clear()
        if passes.recomputed:
            self._recomputed.add(layer)
            self._pending[layer] -= 1
            self._forwards.clear()
            return False
        self._pending[layer] += 1
        self._forwards[layer] += 1
        return finished or self._forwards[layer] > REMEMBERED


class Speeds:
    """Learns the speeds of the ranks of a balancer; `add` subscribes to its passes.

    `current`: speeds in use; (): equal.   `measured`: thousandths of the median; (): unknown.
    """

    def __init__(self, rank: int, cost: CostModel) -> None:
        count_optimizer_steps()
        self.current: Numbers = ()
        self.measured: Numbers = ()
        self._rank, self._cost, self._safe = rank, cost, SafePoints()
        self._first: int | None = None  # the first layer
        self._count = 0  # microbatches so far
        self._samples: list[float] = []
        self._seen, self._stride = 0, 1  # timed in this block; one in how many is a sample
        self._sampled = False
        self._begin = 0.0  # of the span
        self._blocks: list[Numbers] = []  # paces of all ranks, in this span
        self._spans: deque[Numbers] = deque(maxlen=KEPT)
        self._next: Numbers | None = None  # speeds that wait until plans may change

    def report(self, passes: Passes, device_type: str = "cpu") -> int | None:
        """Return 4 times the pace, plus 2 if the span is long enough, plus 1 if plans may change.

        Call it once for every microbatch that begins on such a device, and pass the reports of all
        ranks to `gathered`. None: nothing to exchange in this microbatch, on all ranks.
        """
        safe = self._safe.begin(passes)
        self._first = passes.layer if self._first is None else self._first
        if passes.recomputed or passes.layer != self._first:
            return None
        self._begin = self._begin or monotonic()
        self._count += 1
        if self._count == SILENT and not self._sampled:
            logger.warning(
                "speeds='auto' learns nothing: rank %d has timed no experts; it needs layers with "
                "`serve`, and rows that the balancer dispatches",
                self._rank,
            )
        if self._count % BLOCK:
            return None if self._next is None else int(safe)
        pace, self._samples = round(PARTS * trimmed_mean(self._samples)), []
        self._seen, self._stride = 0, self._seen // ENOUGH | 1  # odd: all layers get their turn
        span = SPAN_OF_CPU if device_type == "cpu" else SPAN
        return 4 * pace + 2 * (monotonic() - self._begin >= span) + safe

    def gathered(self, reports_R: IntArray) -> bool:
        """Take the reports of all ranks; return whether plans have other speeds from now on."""
        if self._count % BLOCK == 0:
            self._end_block(tuple((reports_R // 4).tolist()), bool((reports_R // 2 % 2).all()))
        if self._next is None or not (reports_R % 2).all():
            return False
        self.current, self._next = self._next, None
        if self._rank == 0:
            logger.info("new speeds: %s", describe(self.current))
        return True

    def _end_block(self, paces: Numbers, lasted: bool) -> None:
        """Add a block to the span, which ends if it has `lasted` long enough on all ranks."""
        if all(paces):
            self._blocks.append(paces)
        if not lasted or not self._blocks:
            return
        self._spans.append(tuple(map(median_high, zip(*self._blocks, strict=True))))
        self._blocks, self._begin = [], monotonic()
        if len(self._spans) >= FEWEST:
            self.measured = updated(self.measured or (NOMINAL_SPEED,) * len(paces), self._spans)
            chosen = next_speeds(self.current, self.measured)
            self._next = None if chosen == self.current else chosen

    def add(self, record: PassRecord) -> None:
        """Compare the time of stage 6 with the prediction, in some timed forward passes."""
        if record.kind != FORWARD or not record.timed or record.plan is None:
            return
        self._seen += 1
        if self._seen % self._stride == 0:
            rows_G = rows_of_groups(record.plan, self._rank)
            predicted = self._cost.predicted_seconds(record.layer, rows_G)
            seconds = record.seconds.get("experts", 0.0)
            if predicted > 0 and seconds > 0:
                self._samples.append(seconds / predicted)
                self._sampled = True


def rows_of_groups(plan: Plan, rank: int) -> IntArray:
    """Return [G] the rows of the home experts and of the replicas of a rank."""
    experts, hosts, _slots = plan.replicas.T
    rows_E = plan.loads.sum(axis=0)
    np.subtract.at(rows_E, experts, plan.quotas)
    return np.concatenate((rows_E[plan.topology.home_experts(rank)], plan.quotas[hosts == rank]))


def trimmed_mean(samples: Sequence[float]) -> float:
    """Return the mean without an eighth of the samples at each end; 0.0 of too few samples."""
    if len(samples) < SAMPLES:
        return 0.0
    cut = len(samples) // CUT
    return fmean(sorted(samples)[cut : len(samples) - cut])


def relative_speeds(paces: Numbers) -> Numbers:
    """Return the speeds of ranks with these paces, in thousandths of the median.

    >>> relative_speeds((1_000_000, 1_250_000))  # the faster of two ranks is nominal
    (1000, 800)
    """
    median, (least, most) = sorted(paces)[(len(paces) - 1) // 2], LEARNT_RANGE
    return tuple(min(max(NOMINAL_SPEED * median // pace, least), most) for pace in paces)


def noise(spans: Sequence[Numbers]) -> int:
    """Return the typical change of a pace from span to span, in thousandths.

    Paces are compared with their mean, so that changes of all ranks together do not count.
    """
    ranks = len(spans[0])
    shares = [[NOMINAL_SPEED * ranks * pace // sum(paces) for pace in paces] for paces in spans]
    steps = [
        abs(share - last)
        for before, after in pairwise(shares)
        for last, share in zip(before, after, strict=True)
    ]
    return sorted(steps)[len(steps) // 2] * ranks // (ranks - 1)


def updated(speeds: Numbers, spans: Sequence[Numbers]) -> Numbers:
    """Return the speeds, changed where the last spans agree that they are different.

    A rank that is as fast as the median again gets the nominal speed, without a rest.
    """
    recent = [relative_speeds(paces) for paces in list(spans)[-AGREEING:]]
    least = max(CHANGE, OF_NOISE * noise(spans))
    changed = []
    for speed, values in zip(speeds, zip(*recent, strict=True), strict=True):
        middle, margin = sorted(values)[len(values) // 2], speed * least // NOMINAL_SPEED
        if abs(middle - NOMINAL_SPEED) <= CHANGE:
            changed.append(NOMINAL_SPEED)
        elif min(values) > speed + margin or max(values) < speed - margin:
            changed.append(middle)
        else:
            changed.append(speed)
    return tuple(changed)


def loss(speeds: Numbers, measured: Numbers) -> int:
    """Return the time that plans by `speeds` lose to the ideal split, in millionths of the ideal.

    >>> loss((1000, 1000), (1000, 800))
    125000
    """
    pairs = zip(speeds, measured, strict=True)
    slowest = max(PARTS * planned // speed for planned, speed in pairs)
    return slowest * sum(measured) // sum(speeds) - PARTS


def next_speeds(current: Numbers, measured: Numbers) -> Numbers:
    """Return the speeds to plan with; (): equal. Small differences change nothing.

    >>> next_speeds((), (1000, 990)), next_speeds((), (1000, 804))
    ((), (1000, 800))
    >>> next_speeds((1000, 800), (1000, 811)), next_speeds((1000, 800), (1000, 985))
    ((1000, 800), ())
    """
    equal = loss((1,) * len(measured), measured)
    if equal < (RETURN if current else LEAVE):
        return ()
    if current and loss(current, measured) < ADJUST:
        return current
    return tuple((speed + LEARNT_UNIT // 2) // LEARNT_UNIT * LEARNT_UNIT for speed in measured)


def describe(speeds: Numbers) -> str:
    """Return a text that names the ranks off the median.

    >>> describe((1000, 1000, 880)), describe((1000, 1000))
    ('rank 2 at 88.0 % of the median', 'all ranks equal')
    """
    named = [
        f"rank {rank} at {100 * speed / NOMINAL_SPEED:.1f} % of the median"
        for rank, speed in enumerate(speeds)
        if speed != NOMINAL_SPEED
    ]
    return ", ".join(named) or "all ranks equal"
