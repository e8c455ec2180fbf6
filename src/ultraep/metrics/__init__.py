"""Figures of a run for those who watch it: a log line, scalars, Prometheus, OpenTelemetry.

    metrics = Metrics(balancer, every=100).tell(Log(), scalars(writer), serve(port=9464))
    ...
    metrics.step()                                            after every step

They cost the step a few additions; `docs/metrics.md` tells what each of them means.
"""

from pathlib import Path

from ultraep.metrics.alarms import AlarmSettings
from ultraep.metrics.prometheus import Exporter, serve
from ultraep.metrics.reading import Metrics, Reading, Sink
from ultraep.metrics.sinks import Log, scalars
from ultraep.metrics.telemetry import Telemetry

DASHBOARD = Path(__file__).parent / "dashboard.json"  # for Grafana
ALERTS = Path(__file__).parent / "alerts.yml"  # rules for Prometheus

__all__ = [
    "ALERTS",
    "DASHBOARD",
    "AlarmSettings",
    "Exporter",
    "Log",
    "Metrics",
    "Reading",
    "Sink",
    "Telemetry",
    "scalars",
    "serve",
]
