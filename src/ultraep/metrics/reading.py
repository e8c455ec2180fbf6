"""Metrics: figures of balancers, read once in so many steps and handed to whoever wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import ultraep.metrics.names as names
from ultraep.errors import ConfigError
from ultraep.metrics.alarms import Alarms, AlarmSettings
from ultraep.metrics.meter import Fetched, Meter, Totals
from ultraep.runtime.balancer import Balancer
from ultraep.runtime.stats import Stats


@dataclass(frozen=True)
class Reading:
    """What was counted up to a step.

    values: of the steps since the last reading, by the names of `names`. Imbalances are means over
        layers of microbatches, `skipped` the share of those without a copy, copies and bytes sums,
        `seconds/STAGE` means over those that were timed.
    totals: since the beginning.   alarms: those that hold, and what they mean.
    rank: of this rank in the group; all but bytes and seconds is alike on all.
    """

    step: int
    rank: int
    policy: str
    values: Mapping[str, float]
    totals: Totals
    alarms: Mapping[str, str] = field(default_factory=dict)


Sink: TypeAlias = Callable[[Reading], None]


class Metrics:
    """Counts what balancers do from now on; `step` after every step hands out readings.

    balancers: of this rank; all with one policy. Make this before a graph is captured: the graph
        holds the counting of its replays.
    every: steps between two readings.   alarms: when to raise them.
    Plans are alike on all ranks, so one rank of a group tells all but its own bytes and seconds.
    """

    def __init__(
        self, *balancers: Balancer, every: int = 100, alarms: AlarmSettings | None = None
    ) -> None:
        if not balancers:
            raise ConfigError("metrics need at least one balancer, got none")
        if every < 1:
            raise ConfigError(f"every must be at least 1, got {every}")
        policies = sorted({balancer.config.policy for balancer in balancers})
        if len(policies) > 1:
            raise ConfigError(f"one policy at a time, got {' and '.join(policies)}")
        self.policy, self.every, self._steps = policies[0], every, 0
        self._rank = balancers[0].rank
        self._sinks: list[Sink] = []
        self._coming: tuple[int, list[Fetched]] | None = None
        self._before = Totals()
        on = self.policy != "none" and any(b.topology.slots for b in balancers)
        self._alarms = Alarms(alarms or AlarmSettings(), balancing=on)
        self._meters = [Meter(balancer.topology) for balancer in balancers]
        self._times = [Stats() for _ in balancers]
        for balancer, meter, times in zip(balancers, self._meters, self._times, strict=True):
            balancer.observe(meter)
            balancer.add_sink(times)

    def tell(self, *sinks: Sink) -> Metrics:
        """Hand every reading from now on to these, too."""
        self._sinks.extend(sinks)
        return self

    def step(self) -> None:
        """A step is over. One in `every` is read; what a device tells comes with a later step."""
        self._steps += 1
        if self._coming is not None and self._all_here():
            self._publish()
        if self._steps % self.every == 0:
            if self._coming is not None:
                self._publish()
            self._fetch()
            if self._all_here():
                self._publish()

    def read(self) -> Reading:
        """Read now, and hand it out; waits for a device."""
        if self._coming is not None:
            self._publish()
        for meter in self._meters:
            meter.settle()
        self._fetch()
        return self._publish()

    def _fetch(self) -> None:
        self._coming = self._steps, [meter.fetch() for meter in self._meters]

    def _all_here(self) -> bool:
        return self._coming is not None and all(fetched.here() for fetched in self._coming[1])

    def _publish(self) -> Reading:
        assert self._coming is not None
        (step, fetched), self._coming = self._coming, None
        totals = Totals()
        for one in fetched:
            one.add_to(totals)
        for times in self._times:
            totals.timed += times.timed
            for stage, seconds in times.seconds.items():
                totals.seconds[stage] += seconds
        values = since(self._before, totals)
        alarms = self._alarms.look(values) if values["microbatches"] else {}
        self._before = totals
        reading = Reading(step, self._rank, self.policy, values, totals, alarms)
        for sink in self._sinks:
            sink(reading)
        return reading


def since(before: Totals, now: Totals) -> dict[str, float]:
    """The values between two totals."""
    count = now.microbatches - before.microbatches
    timed = now.timed - before.timed
    values = {
        "microbatches": count,
        names.BEFORE: (now.before - before.before) / count if count else 1.0,
        names.AFTER: (now.after - before.after) / count if count else 1.0,
        names.WORST: now.worst if count else 1.0,
        names.COPIES: now.copies - before.copies,
        names.SKIPPED: (now.skipped - before.skipped) / count if count else 0.0,
        names.WEIGHTS: now.weights - before.weights,
        names.GRADIENTS: now.gradients - before.gradients,
    }
    for stage, seconds in now.seconds.items():
        if timed:
            gone = seconds - before.seconds.get(stage, 0.0)
            values[f"{names.SECONDS}/{stage}"] = gone / timed
    return values
