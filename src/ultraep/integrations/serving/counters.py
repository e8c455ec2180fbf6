"""Counters of a plug-in on the engine's own metrics page.

Worker processes count, and API server processes serve the page. prometheus_client combines them if
`PROMETHEUS_MULTIPROC_DIR` is set. vLLM sets it itself when it starts several API servers, as it
does with data parallelism; SGLang sets it with `--enable-metrics`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ultraep.metrics.exporters import FIGURES
from ultraep.passes import PassRecord

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
LEFT_OUT = "gradients_sent_bytes"  # a counter of training


class ServingCounters:
    """Counts passes on the metrics page; create it once per process.

    rank: all ranks make the same plans, so only rank 0 counts them.
    """

    def __init__(self, rank: int, registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import REGISTRY, Counter, Summary  # installed with the engine

        self._rank = rank
        kinds: dict[str, Any] = {"counter": Counter, "summary": Summary}
        self._counters = {
            figure.name: kinds[figure.kind](
                figure.full_name,
                figure.help,
                [figure.label] if figure.label else [],
                registry=REGISTRY if registry is None else registry,
            )
            for figure in FIGURES
            if figure.kind in kinds and figure.name != LEFT_OUT
        }

    def add(self, record: PassRecord) -> None:
        """Count a pass."""
        counters, plan = self._counters, record.plan
        for stage, seconds in record.seconds.items():
            counters["stage_seconds"].labels(stage).inc(seconds)
        counters["copies_sent"].inc(sum(record.replicas_sent.values()))
        counters["weights_sent_bytes"].inc(sum(record.bytes_sent.values()))
        if plan is not None:
            counters["microbatches_timed"].inc(record.timed)
        if plan is not None and self._rank == 0:
            policy = plan.config.policy
            counters["imbalance_before"].labels(policy).observe(plan.initial_imbalance)
            counters["imbalance_after"].labels(policy).observe(plan.imbalance)
            counters["copies_planned"].inc(plan.num_replicas)
            counters["microbatches_skipped"].inc(plan.num_replicas == 0)


def where_they_are() -> str:
    """Whether the metrics page shows the counters, for the log."""
    if os.environ.get(VARIABLE):
        return "counters are on the metrics page"
    return (
        "counters are not on the metrics page; "
        f"set {VARIABLE}, or --enable-metrics in SGLang, to show them"
    )
