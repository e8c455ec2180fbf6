"""Stats: running sums of what a balancer planned and sent, and of the seconds of its stages.

`Balancer.stats`, `Balancer.summary` and `ultraep.metrics` count with this class.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from ultraep.config import PER_SECOND
from ultraep.passes import PassRecord
from ultraep.plan import Plan
from ultraep.trace.schema import COST


@dataclass
class Stats:
    """Sums over microbatches; a microbatch counts once per layer.

    before, after: sums of imbalances.   worst: the largest imbalance after balancing.
    skipped: microbatches whose plan has no replica.
    priced: microbatches planned with rates; `left_alone`, `time` and `time_without_replicas` are
        sums over them.
    short: microbatches that more slots would make more even.
    bytes_sent, replicas_sent: by "weights" and "gradients".
    seconds: by stage, in the `timed` microbatches.
    """

    microbatches: int = 0
    replicas: int = 0
    skipped: int = 0
    before: float = 0.0
    after: float = 0.0
    worst: float = 0.0
    rows: int = 0
    remote_rows: int = 0
    priced: int = 0
    left_alone: int = 0
    short: int = 0
    time: int = 0
    time_without_replicas: int = 0
    timed: int = 0
    bytes_sent: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    replicas_sent: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def reset(self) -> None:
        """Set all sums to zero."""
        vars(self).update(vars(type(self)()))

    def add(self, record: PassRecord) -> None:
        """Count a pass."""
        for stage, seconds in record.seconds.items():
            self.seconds[stage] += seconds
        for what, replicas in record.replicas_sent.items():
            self.bytes_sent[what] += record.bytes_sent[what]
            self.replicas_sent[what] += replicas
        if record.plan is not None and not record.backward:
            self.timed += record.timed
            self.add_plan(record.plan)

    def add_plan(self, plan: Plan) -> None:
        """Count a plan: imbalances, replicas, rows and predicted times.

        A rank alone has nothing to balance: its plan may be one of the device.
        """
        self.microbatches += 1
        if plan.topology.ranks == 1:  # nothing to balance
            self.skipped += 1
            self.before += 1.0
            self.after += 1.0
            self.worst = max(self.worst, 1.0)
            return
        replicas = plan.num_replicas
        self.replicas += replicas
        self.skipped += replicas == 0
        imbalance = plan.imbalance
        self.before += plan.initial_imbalance
        self.after += imbalance
        self.worst = max(self.worst, imbalance)
        self.short += plan.short_of_slots
        self.rows += plan.total
        self.remote_rows += plan.remote_tokens
        if plan.rates is not None:
            self.priced += 1
            self.left_alone += plan.left_alone
            self.time += plan.time or 0
            self.time_without_replicas += plan.time_without_replicas or 0

    def merge(self, other: Stats, sign: int = 1) -> None:
        """Add the sums of another `Stats`, or subtract them with sign=-1."""
        for name, value in vars(other).items():
            if isinstance(value, dict):
                own = getattr(self, name)
                for key, number in value.items():
                    own[key] += sign * number
            elif name != "worst":
                setattr(self, name, getattr(self, name) + sign * value)
            elif sign > 0:
                self.worst = max(self.worst, value)

    def figures(self) -> dict[str, float]:
        """Mean imbalances, the worst imbalance, and sums, by the names that users see."""
        count = max(1, self.microbatches)
        return {
            "microbatches": self.microbatches,
            "imbalance_before": self.before / count,
            "imbalance_after": self.after / count,
            "imbalance_worst": self.worst,
            "copies": self.replicas,
            "weights_bytes_sent": self.bytes_sent["weights"],
            "gradients_bytes_sent": self.bytes_sent["gradients"],
        }

    def report(self) -> dict[str, Any]:
        """Figures of `Balancer.stats`.

        `seconds` are extrapolated from the timed microbatches to all microbatches.
        """
        scale = max(1, self.microbatches) / self.timed if self.timed else 1.0
        return self.figures() | {
            "priced": self.priced,
            "left_alone": self.left_alone,
            "short_of_slots": self.short,
            "planned_seconds": self.time / PER_SECOND,
            "planned_seconds_without_replicas": self.time_without_replicas / PER_SECOND,
            "remote_share": self.remote_rows / max(1, self.rows),
            "weights_copies_sent": self.replicas_sent["weights"],
            "gradients_copies_sent": self.replicas_sent["gradients"],
            "timed": self.timed,
            "seconds": {stage: scale * seconds for stage, seconds in self.seconds.items()},
        }


class StatsByPolicy:
    """The stats of one balancer: microbatches with another policy do not mix with its own."""

    def __init__(self) -> None:
        self._stats: dict[str, Stats] = defaultdict(Stats)

    def add(self, record: PassRecord) -> None:
        """Count a pass."""
        self._stats["" if record.plan is None else record.plan.config.policy].add(record)

    def reset(self) -> None:
        """Forget everything."""
        self._stats.clear()

    def total(self) -> Stats:
        """Return the stats of all policies together."""
        total = Stats()
        for stats in self._stats.values():
            total.merge(stats)
        return total

    def summary(self, policy: str) -> str:
        """Return lines with the imbalance, the replicas, and the time with this policy."""
        own = self._stats[policy]
        if not own.microbatches:
            return f"no microbatch was planned by policy {policy!r} yet"
        others = self.total().microbatches - own.microbatches
        beside = f" ({others:,} of another)" if others else ""
        counted = f"mean of {_microbatches(own.microbatches)} of policy {policy!r}{beside}"
        lines = [f"{_imbalance(own)}, {counted}", _replicas(own), _time(own)]
        if own.short:
            lines.append(f"more slots would help {_microbatches(own.short)}: no free slot was left")
        return "\n".join(lines)


def _microbatches(count: int) -> str:
    return f"{count:,} microbatch{'es' * (count != 1)}"


def _imbalance(stats: Stats) -> str:
    figures = stats.figures()
    before, after = figures["imbalance_before"], figures["imbalance_after"]
    return f"imbalance {before:.2f}" + f" -> {after:.2f}" * bool(stats.replicas)


def _replicas(stats: Stats) -> str:
    if not stats.replicas:
        return "0 replicas" + ": none would have saved time" * bool(stats.left_alone)
    weights, gradients = (stats.bytes_sent[what] / 1e6 for what in ("weights", "gradients"))
    return (
        f"{stats.replicas / stats.microbatches:.1f} replicas per microbatch; this rank sent "
        f"{weights:,.1f} MB of weights, {gradients:,.1f} MB of gradients"
    )


def _time(stats: Stats) -> str:
    """Return the predicted saving; without rates or replicas, what this rank measured."""
    if stats.priced and stats.replicas:
        planned, without = (
            1e3 * number / PER_SECOND / stats.priced
            for number in (stats.time, stats.time_without_replicas)
        )
        change = f"{_ms(planned)} instead of {_ms(without)} per microbatch"
        return f"predicted time of experts and replicas: {change}"
    if not stats.timed:
        return "no microbatch was timed"
    measured = {stage: 1e3 * seconds / stats.timed for stage, seconds in stats.seconds.items()}
    experts = measured.get("experts", 0.0) + measured.get("experts back", 0.0)
    cost = sum(measured.get(stage, 0.0) for stage in COST)
    return f"this rank spent {_ms(experts)} per microbatch in experts, {_ms(cost)} in balancing"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"
