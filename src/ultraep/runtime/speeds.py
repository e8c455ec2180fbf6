"""Speeds that a balancer learns: `BalanceConfig(speeds="auto")`.

Every rank divides the time of stage 6 by the time that the measured rates predict for its groups of
rows. It averages this *pace* over blocks of microbatches, and changes the value that it reports
only when several blocks agree. The record of loads carries the value to all ranks. All ranks
compute the speeds from the same integers, and use them from the same microbatch on.

Microbatches are counted in the first layer, so one count is one pass through the model.

Shapes: R ranks.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from weakref import WeakKeyDictionary

from ultraep.arrays import IntArray
from ultraep.config import AUTO, NOMINAL_SPEED, PARTS, BalanceConfig
from ultraep.microbatch import MicrobatchInfo
from ultraep.plan import Plan
from ultraep.reroute import rows_received
from ultraep.runtime.history import REMEMBERED
from ultraep.runtime.pricing import Pricing
from ultraep.runtime.versions import count_optimizer_steps, optimizer_steps

BLOCK = 40  # microbatches; speeds change at most once in a block
AGREEING = 3  # blocks in a row that show a change
FEWEST = 4  # samples of a block that counts
CUT = 8  # an eighth of the samples of a block is left out at each end
KEPT = 10  # blocks from which the noise is estimated
CHANGE = 0.02  # of a pace, at least
# Time that a plan loses to the ideal split, in millionths: to leave equal speeds, to adjust unequal
# ones, and to return to equal ones.
LEAVE, ADJUST, RETURN = 30_000, 20_000, 15_000
ROUNDED = 10  # thousandths
LEAST, MOST = 100, 4_000  # thousandths of the median; at most a factor of 40
SILENT = 5 * BLOCK  # microbatches without a sample before a warning

logger = logging.getLogger(__name__)


class Pace:
    """The time that rows take on this rank over the predicted time. value: 0.0: unknown."""

    def __init__(self) -> None:
        self.value = 0.0
        self._samples: list[float] = []
        self._means: deque[float] = deque(maxlen=KEPT)

    def add(self, sample: float) -> None:
        self._samples.append(sample)

    def end_block(self) -> None:
        """Average the samples of the block; change the value if the last blocks agree."""
        samples, self._samples = sorted(self._samples), []
        if len(samples) < FEWEST:
            return
        cut = len(samples) // CUT
        self._means.append(fmean(samples[cut : len(samples) - cut]))
        if len(self._means) < AGREEING:
            return
        low, *middle, high = sorted(list(self._means)[-AGREEING:])
        steps = sorted(abs(mean - last) for last, mean in pairwise(self._means))
        margin = max(CHANGE * self.value, 2 * steps[len(steps) // 2])
        if low > self.value + margin or high < self.value - margin:
            self.value = middle[len(middle) // 2]


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

    def begin(self, info: MicrobatchInfo) -> bool:
        """Note that a microbatch begins; return whether its plan may differ from earlier ones."""
        layer, finished = info.layer, False
        if self._steps != optimizer_steps.total:
            finished = bool(self._recomputed) and not any(
                self._pending[recomputed] for recomputed in self._recomputed
            )
            self._steps = optimizer_steps.total
            self._pending.clear()
        if info.recomputed:
            self._recomputed.add(layer)
            self._pending[layer] -= 1
            self._forwards.clear()
            return False
        self._pending[layer] += 1
        self._forwards[layer] += 1
        return finished or self._forwards[layer] > REMEMBERED


class Speeds:
    """The speeds of the plans of one balancer, and a sink of its clocks.

    `current`: speeds in use; (): equal.   `measured`: as measured last; (): unknown.
    """

    def __init__(self, config: BalanceConfig, ranks: int, rank: int, pricing: Pricing) -> None:
        self.learns = config.speeds == AUTO and ranks > 1
        self.current = () if config.speeds == AUTO else config.speeds_for(ranks)
        self.measured: tuple[int, ...] = ()
        if self.learns:
            count_optimizer_steps()
        self._rank, self._pricing = rank, pricing
        self._pace, self._safe = Pace(), SafePoints()
        self._first: int | None = None  # the first layer
        self._count, self._due, self._sampled = 0, False, False
        self._predicted: WeakKeyDictionary[MicrobatchInfo, float] = WeakKeyDictionary()
        self._configs: dict[tuple[BalanceConfig, tuple[int, ...]], BalanceConfig] = {}

    def applied(self, config: BalanceConfig) -> BalanceConfig:
        """Return the config of a plan, with the current speeds if they are learnt."""
        if config.speeds != AUTO:
            return config
        key = config, self.current
        if key not in self._configs:
            self._configs[key] = replace(config, speeds=self.current or None)
        return self._configs[key]

    def report(self, info: MicrobatchInfo) -> int:
        """Return the pace of this rank for the record of this microbatch, in millionths.

        0: it is unknown, or plans must not change now. Call once for each microbatch.
        """
        if not self.learns:
            return 0
        safe = self._safe.begin(info)
        if info.recomputed:
            return 0
        self._first = info.layer if self._first is None else self._first
        if info.layer != self._first:
            return 0
        self._count += 1
        if self._count % BLOCK == 0:
            self._pace.end_block()
            self._due = True
        if self._count == SILENT and not self._sampled:
            logger.warning(
                "speeds='auto' learns nothing: rank %d has timed no experts; it needs layers with "
                "`serve`, and rows that the balancer dispatches",
                self._rank,
            )
        return round(self._pace.value * PARTS) if safe else 0

    def gathered(self, info: MicrobatchInfo, paces_R: IntArray) -> None:
        """Choose the speeds from this microbatch on, by the paces that all ranks have reported."""
        if not self._due or info.recomputed or info.layer != self._first or not paces_R.all():
            return
        self._due = False
        self.measured = relative_speeds(paces_R.tolist())
        chosen = next_speeds(self.current, self.measured)
        if chosen != self.current and self._rank == 0:
            logger.info(
                "speeds from microbatch %d on: %s", info.step, describe(chosen or self.measured)
            )
        self.current = chosen

    # As a sink of the clocks:

    def planned(self, microbatch: MicrobatchInfo, plan: Plan) -> None:
        if microbatch.timed and not microbatch.recomputed:
            rows_L = rows_received(plan, self._rank).sum(axis=0)
            self._predicted[microbatch] = self._pricing.seconds(microbatch.layer, rows_L)

    def took(self, microbatch: MicrobatchInfo, stage: str, seconds: float) -> None:
        if stage == "experts":
            predicted = self._predicted.get(microbatch, 0.0)
            if predicted > 0 and seconds > 0:
                self._pace.add(seconds / predicted)
                self._sampled = True

    def sent(self, _: MicrobatchInfo, _what: str, _nbytes: int, _copies: int) -> None:
        """Nothing to learn."""

    def passed(self, _: MicrobatchInfo, __: float) -> None:
        """Nothing to learn."""


def relative_speeds(paces: list[int]) -> tuple[int, ...]:
    """Return the speeds of ranks with these paces, in thousandths of the median.

    >>> relative_speeds([1_000_000, 1_250_000])  # the faster of two ranks is nominal
    (1000, 800)
    """
    median = sorted(paces)[(len(paces) - 1) // 2]
    return tuple(min(max(NOMINAL_SPEED * median // pace, LEAST), MOST) for pace in paces)


def loss(speeds: tuple[int, ...], measured: tuple[int, ...]) -> int:
    """Return the time that plans by `speeds` lose to the ideal split, in millionths of the ideal.

    >>> loss((1000, 1000), (1000, 800))
    125000
    """
    pairs = zip(speeds, measured, strict=True)
    slowest = max(PARTS * planned // speed for planned, speed in pairs)
    return slowest * sum(measured) // sum(speeds) - PARTS


def next_speeds(current: tuple[int, ...], measured: tuple[int, ...]) -> tuple[int, ...]:
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
    return tuple((speed + ROUNDED // 2) // ROUNDED * ROUNDED for speed in measured)


def describe(speeds: tuple[int, ...]) -> str:
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
