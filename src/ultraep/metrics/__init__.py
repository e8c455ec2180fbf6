"""Figures of a running job: a log line, scalars, Prometheus.

    metrics = Metrics(balancer, every=100).tell(Log(), scalars(writer), serve(port=9464))
    ...
    metrics.step()                                            after every step

They cost a step a few additions. docs/metrics.md explains every figure.
"""

from pathlib import Path

from ultraep.metrics.exporters import Exporter, Log, scalars, serve
from ultraep.metrics.reading import Metrics, Reading, Sink

DASHBOARD = Path(__file__).parent / "dashboard.json"  # for Grafana

__all__ = ["DASHBOARD", "Exporter", "Log", "Metrics", "Reading", "Sink", "scalars", "serve"]
