"""Names of all figures that leave the process, in one place: scalars, counters, panels, alarms.

The exporter, the plug-in for vLLM, the framework callbacks, the dashboard and the alert rules use
these; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "ultraep"
BEFORE, AFTER, WORST = "imbalance_before", "imbalance_after", "imbalance_worst"
COPIES, SKIPPED = "copies", "skipped"
WEIGHTS, GRADIENTS = "weights_bytes_sent", "gradients_bytes_sent"
MEANS = (BEFORE, AFTER)
SUMS = (COPIES, WEIGHTS, GRADIENTS)
SECONDS = "seconds"  # of a stage: `seconds/experts`

OF_IMBALANCE = "load of the fullest rank over the mean"


@dataclass(frozen=True)
class Exported:
    """A figure as Prometheus knows it. Counters get `_total`, summaries `_sum` and `_count`."""

    name: str
    kind: str  # summary, counter or gauge
    help: str
    label: str | None = None

    @property
    def samples(self) -> tuple[str, ...]:
        """Names on the page, without labels.

        >>> Exported("ultraep_copies_planned", "counter", "").samples
        ('ultraep_copies_planned_total',)
        """
        ends = {"summary": ("_sum", "_count"), "counter": ("_total",), "gauge": ("",)}
        return tuple(self.name + end for end in ends[self.kind])


IMBALANCE_BEFORE = Exported(
    f"{PREFIX}_imbalance_before", "summary", f"{OF_IMBALANCE}, before copies", "policy"
)
IMBALANCE_AFTER = Exported(
    f"{PREFIX}_imbalance_after", "summary", f"{OF_IMBALANCE}, as it was computed", "policy"
)
IMBALANCE_WORST = Exported(
    f"{PREFIX}_imbalance_worst", "gauge", f"{OF_IMBALANCE}, the worst since the last reading"
)
COPIES_PLANNED = Exported(f"{PREFIX}_copies_planned", "counter", "copies of experts in all plans")
COPIES_SENT = Exported(f"{PREFIX}_copies_sent", "counter", "copies that were not there yet")
LEFT_ALONE = Exported(
    f"{PREFIX}_microbatches_skipped", "counter", "layers of microbatches without any copy"
)
WEIGHTS_SENT = Exported(f"{PREFIX}_weights_sent_bytes", "counter", "bytes of copies sent")
GRADIENTS_SENT = Exported(
    f"{PREFIX}_gradients_sent_bytes", "counter", "bytes of gradients of copies sent"
)
STAGE_SECONDS = Exported(
    f"{PREFIX}_stage_seconds", "counter", "time in a stage, of the microbatches timed", "stage"
)
TIMED = Exported(
    f"{PREFIX}_microbatches_timed", "counter", "layers of microbatches whose stages were timed"
)
ALARM = Exported(f"{PREFIX}_alarm", "gauge", "1 while an alarm holds", "alarm")

EXPORTED = (
    IMBALANCE_BEFORE,
    IMBALANCE_AFTER,
    IMBALANCE_WORST,
    COPIES_PLANNED,
    COPIES_SENT,
    LEFT_ALONE,
    WEIGHTS_SENT,
    GRADIENTS_SENT,
    STAGE_SECONDS,
    TIMED,
    ALARM,
)
