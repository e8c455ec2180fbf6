"""Metrics: figures of balancers, read every few steps and passed to sinks.

Passes are counted on the host when they have finished. Replays of CUDA graphs are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ultraep.config import NOMINAL_SPEED
from ultraep.errors import ConfigError
from ultraep.runtime.balancer import Balancer
from ultraep.runtime.stats import Stats

SPEED = "speed/"  # then the number of a rank


@dataclass(frozen=True)
class Reading:
    """Counts up to a step.

    values: figures since the previous reading. Imbalances are means over layers of microbatches,
        `skipped` is the share of them without a replica, copies and bytes are sums, and
        `seconds/STAGE` are means over the timed microbatches. `speed/RANK` is the speed of a rank
        over the median, as measured last; it is missing if speeds are unknown.
    totals: sums since `Metrics` was created; `worst` since the previous reading.
    rank: this rank. Only bytes and seconds differ between ranks.
    """

    step: int
    rank: int
    policy: str
    values: Mapping[str, float]
    totals: Stats


Sink: TypeAlias = Callable[[Reading], None]


class Metrics:
    """Counts plans, bytes and seconds of balancers, and passes readings to sinks.

    Call `step` after every training step.

    balancers: balancers of this rank, all with one policy.
    every: steps between two readings.
    """

    def __init__(self, *balancers: Balancer, every: int = 100) -> None:
        if not balancers:
            raise ConfigError("metrics need at least one balancer, got none")
        if every < 1:
            raise ConfigError(f"every must be at least 1, got {every}")
        policies = sorted({balancer.config.policy for balancer in balancers})
        if len(policies) > 1:
            raise ConfigError(
                f"all balancers must have one policy, got {' and '.join(policies)}; create one "
                "Metrics per policy"
            )
        self.policy, self.every, self._steps = policies[0], every, 0
        self._rank = balancers[0].rank
        self._sinks: list[Sink] = []
        self._counted, self._previous = Stats(), Stats()
        self._balancers = balancers
        for balancer in balancers:
            balancer.subscribe(self._counted.add)

    def tell(self, *sinks: Sink) -> Metrics:
        """Pass every later reading to these sinks, too."""
        self._sinks.extend(sinks)
        return self

    def step(self) -> None:
        """Count a step, and read every few steps. A GPU may deliver passes in a later step."""
        self._steps += 1
        if self._steps % self.every == 0:
            self._publish()

    def read(self) -> Reading:
        """Read now and pass the reading to the sinks; waits for the device."""
        for balancer in self._balancers:
            balancer.settle()
        return self._publish()

    def _publish(self) -> Reading:
        totals = Stats()
        totals.merge(self._counted)
        self._counted.worst = 0.0
        values = values_between(self._previous, totals) | self._speeds()
        self._previous = totals
        reading = Reading(self._steps, self._rank, self.policy, values, totals)
        for sink in self._sinks:
            sink(reading)
        return reading

    def _speeds(self) -> dict[str, float]:
        """Speeds of the ranks of the first balancer that has any."""
        for balancer in self._balancers:
            if speeds := balancer.measured_speeds or balancer.speeds:
                return {f"{SPEED}{rank}": s / NOMINAL_SPEED for rank, s in enumerate(speeds)}
        return {}


def values_between(previous: Stats, totals: Stats) -> dict[str, float]:
    """Figures of the microbatches between two readings."""
    recent = Stats()
    recent.merge(totals)
    recent.merge(previous, sign=-1)
    values = recent.figures() | {"skipped": recent.skipped / max(1, recent.microbatches)}
    if not recent.microbatches:
        values |= dict.fromkeys(("imbalance_before", "imbalance_after", "imbalance_worst"), 1.0)
    if recent.timed:
        for stage, seconds in recent.seconds.items():
            values[f"seconds/{stage}"] = seconds / recent.timed
    return values
