"""Stats: what a balancer planned and moved, and how long its stages took."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ultraep.config import PER_SECOND
from ultraep.microbatch import MicrobatchInfo
from ultraep.plan import Plan


class Stats:
    """Running sums; `summary` turns them into means."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin to count."""
        self._microbatches = self.timed = 0  # `timed`: those whose `seconds` are known
        self._before = self._after = self._worst = 0.0
        self._copies = self._tokens = self._remote = 0
        self._left_alone = self._priced = self._time = self._without = 0
        self._sent: dict[str, int] = defaultdict(int)
        self.seconds: dict[str, float] = defaultdict(float)

    def planned(self, microbatch: MicrobatchInfo, plan: Plan) -> None:
        self._microbatches += 1
        self.timed += microbatch.timed
        self._before += plan.initial_imbalance
        self._after += plan.imbalance
        self._worst = max(self._worst, plan.imbalance)
        self._copies += plan.num_replicas
        self._tokens += plan.total
        self._remote += plan.remote_tokens
        time, without = plan.time, plan.time_without_replicas
        if time is not None and without is not None:
            self._priced += 1
            self._left_alone += plan.left_alone
            self._time += time
            self._without += without

    def took(self, _: MicrobatchInfo, stage: str, seconds: float) -> None:
        self.seconds[stage] += seconds

    def sent(self, _: MicrobatchInfo, what: str, nbytes: int, copies: int) -> None:
        self._sent[f"{what}_bytes_sent"] += nbytes
        self._sent[f"{what}_copies_sent"] += copies

    def passed(self, _: MicrobatchInfo, __: float) -> None:
        """Nothing: sums know no microbatch."""

    def summary(self) -> dict[str, Any]:
        """Means over microbatches, totals of what this rank sent, seconds per stage.

        Of the `priced` ones, planned by rates: how many of them are left alone since no copies
        would pay, and what the plans should take in all, as they are and without copies.
        """
        count = max(1, self._microbatches)
        for_all = count / self.timed if self.timed else 1.0
        return {
            "microbatches": self._microbatches,
            "imbalance_before": self._before / count,
            "imbalance_after": self._after / count,
            "imbalance_worst": self._worst,
            "copies": self._copies,
            "priced": self._priced,
            "left_alone": self._left_alone,
            "planned_seconds": self._time / PER_SECOND,
            "planned_seconds_without_copies": self._without / PER_SECOND,
            "remote_share": self._remote / max(1, self._tokens),
            "weights_bytes_sent": self._sent["weights_bytes_sent"],
            "weights_copies_sent": self._sent["weights_copies_sent"],
            "gradients_bytes_sent": self._sent["gradients_bytes_sent"],
            "gradients_copies_sent": self._sent["gradients_copies_sent"],
            "timed": self.timed,
            "seconds": {stage: for_all * found for stage, found in self.seconds.items()},
        }
