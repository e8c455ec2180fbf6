"""All figures for Prometheus: names, kinds, help texts, and where values are.

The exporter and the plug-in for vLLM use this table; a test compares the dashboard with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ultraep.metrics.reading import SPEED, Reading

PREFIX = "ultraep"
IMBALANCE = "load of the busiest rank over the mean"


@dataclass(frozen=True)
class Figure:
    """A figure as Prometheus shows it.

    kind: summary, counter or gauge.   label: name of its label.
    values: its value in a reading, or its values by label; None: only vLLM exports it.
    per_rank: whether it differs between ranks. Rank 0 alone exports the other figures.
    """

    name: str
    kind: str
    help: str
    values: Callable[[Reading], float | Mapping[str, float]] | None
    label: str | None = None
    per_rank: bool = False

    @property
    def full_name(self) -> str:
        """The name with its prefix."""
        return f"{PREFIX}_{self.name}"

    def samples(self, reading: Reading) -> list[tuple[str, float]]:
        """Its labels and values in a reading; the label is empty if it has none."""
        assert self.values is not None
        values = self.values(reading)
        return list(values.items()) if isinstance(values, Mapping) else [("", values)]


FIGURES = (
    Figure("imbalance_before", "summary", f"{IMBALANCE}, without replicas",
           lambda r: {r.policy: r.totals.before}, label="policy"),
    Figure("imbalance_after", "summary", f"{IMBALANCE}, with replicas",
           lambda r: {r.policy: r.totals.after}, label="policy"),
    Figure("imbalance_worst", "gauge", f"largest {IMBALANCE} since the last reading",
           lambda r: r.totals.worst),
    Figure("copies_planned", "counter", "replicas in all plans", lambda r: r.totals.replicas),
    Figure("copies_sent", "counter", "replicas sent", None),
    Figure("microbatches_skipped", "counter", "layers of microbatches without a replica",
           lambda r: r.totals.skipped),
    Figure("weights_sent_bytes", "counter", "bytes of replicas sent",
           lambda r: r.totals.bytes_sent["weights"], per_rank=True),
    Figure("gradients_sent_bytes", "counter", "bytes of gradients of replicas sent",
           lambda r: r.totals.bytes_sent["gradients"], per_rank=True),
    Figure("stage_seconds", "counter", "seconds of a stage in the timed microbatches",
           lambda r: r.totals.seconds, label="stage", per_rank=True),
    Figure("microbatches_timed", "counter", "layers of microbatches whose stages were timed",
           lambda r: r.totals.timed, per_rank=True),
    Figure("rank_speed", "gauge", "speed of a rank over the median, as measured last",
           lambda r: {name.removeprefix(SPEED): value for name, value in r.values.items()
                      if name.startswith(SPEED)}, label="rank"),
)  # fmt: skip
MEASURED = tuple(figure for figure in FIGURES if figure.values is not None)
