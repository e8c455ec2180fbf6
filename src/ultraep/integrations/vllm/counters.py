"""Numbers for operators, on vLLM's own page of metrics.

They are made in the processes that compute; the page is served by others. prometheus_client brings
them together where it works for several processes: where `PROMETHEUS_MULTIPROC_DIR` is set, as
vLLM does by itself when it starts several API servers, which it does with data parallelism.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ultraep.metrics.names as names
from ultraep.microbatch import MicrobatchInfo
from ultraep.plan import Plan

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


class ServingCounters:
    """A sink whose sums others read; made once in a process.

    rank: plans are alike on all ranks, so that only the first one counts them.
    """

    def __init__(self, rank: int, registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import REGISTRY, Counter, Summary  # comes with vLLM

        where: Any = {"registry": REGISTRY if registry is None else registry}
        self._rank = rank

        def make(kind: Any, figure: names.Exported) -> Any:
            labels = [figure.label] if figure.label else []
            return kind(figure.name, figure.help, labels, **where)

        self._before = make(Summary, names.IMBALANCE_BEFORE)
        self._after = make(Summary, names.IMBALANCE_AFTER)
        self._planned = make(Counter, names.COPIES_PLANNED)
        self._left_alone = make(Counter, names.LEFT_ALONE)
        self._copies = make(Counter, names.COPIES_SENT)
        self._bytes = make(Counter, names.WEIGHTS_SENT)
        self._seconds = make(Counter, names.STAGE_SECONDS)
        self._timed = make(Counter, names.TIMED)

    def planned(self, microbatch: MicrobatchInfo, plan: Plan) -> None:
        self._timed.inc(microbatch.timed)
        if self._rank == 0:
            policy = plan.config.policy
            self._before.labels(policy).observe(plan.initial_imbalance)
            self._after.labels(policy).observe(plan.imbalance)
            self._planned.inc(plan.num_replicas)
            self._left_alone.inc(plan.num_replicas == 0)

    def took(self, _: MicrobatchInfo, stage: str, seconds: float) -> None:
        self._seconds.labels(stage).inc(seconds)

    def sent(self, _: MicrobatchInfo, __: str, nbytes: int, copies: int) -> None:
        self._copies.inc(copies)
        self._bytes.inc(nbytes)

    def passed(self, _: MicrobatchInfo, __: float) -> None:
        """Nothing: sums know no microbatch."""


def where_they_are() -> str:
    """Whether the page of metrics has them, for the log."""
    if os.environ.get(VARIABLE):
        return "counters are on the page of metrics"
    return f"counters are not on the page of metrics: that needs {VARIABLE}"
