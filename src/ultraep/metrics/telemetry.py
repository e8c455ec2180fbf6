"""Figures for OpenTelemetry: instruments that show the last reading when they are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import ultraep.metrics.names as names
from ultraep.errors import BackendUnavailable
from ultraep.metrics.names import Exported
from ultraep.metrics.reading import Reading

Pairs = list[tuple[float, dict[str, str]]]
SHOWN: dict[Exported, Callable[[Reading], Pairs]] = {
    names.IMBALANCE_WORST: lambda r: [(r.totals.worst, {})],
    names.COPIES_PLANNED: lambda r: [(r.totals.copies, {})],
    names.LEFT_ALONE: lambda r: [(r.totals.skipped, {})],
    names.WEIGHTS_SENT: lambda r: [(r.totals.weights, {})],
    names.GRADIENTS_SENT: lambda r: [(r.totals.gradients, {})],
    names.TIMED: lambda r: [(r.totals.timed, {})],
    names.STAGE_SECONDS: lambda r: [(s, {"stage": name}) for name, s in r.totals.seconds.items()],
    names.ALARM: lambda r: [(1.0, {"alarm": name}) for name in r.alarms],
}
MEANS = {names.IMBALANCE_BEFORE: names.BEFORE, names.IMBALANCE_AFTER: names.AFTER}


class Telemetry:
    """A sink whose last reading a meter of OpenTelemetry shows; None: that of the process.

    Imbalances are gauges: means since the reading before.
    """

    def __init__(self, meter: Any = None) -> None:
        try:
            from opentelemetry import metrics
        except ImportError:
            raise BackendUnavailable(
                "OpenTelemetry is not installed: pip install opentelemetry-sdk"
            ) from None
        self._observation = metrics.Observation
        self._last: Reading | None = None
        meter = meter or metrics.get_meter(names.PREFIX)
        for figure, show in SHOWN.items():
            kind = meter.create_observable_gauge
            if figure.kind == "counter":
                kind = meter.create_observable_counter
            kind(figure.name, [self._callback(show)], description=figure.help)
        for figure, name in MEANS.items():
            shown = self._callback(_mean_of(name))
            meter.create_observable_gauge(figure.name, [shown], description=figure.help)

    def __call__(self, reading: Reading) -> None:
        self._last = reading

    def _callback(self, show: Callable[[Reading], Pairs]) -> Callable[[Any], Iterable[Any]]:
        def observe(_: Any) -> Iterable[Any]:
            if self._last is None:
                return []
            return [self._observation(value, labels) for value, labels in show(self._last)]

        return observe


def _mean_of(name: str) -> Callable[[Reading], Pairs]:
    return lambda reading: [(reading.values[name], {"policy": reading.policy})]
