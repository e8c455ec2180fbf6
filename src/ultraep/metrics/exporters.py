"""Sinks of readings: a log line, scalars, Prometheus.

The exporter of Prometheus shows the last reading and computes nothing when a scraper asks. Its
`FIGURES` are also those of the plug-in for vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ultraep.errors import BackendUnavailable, CommunicationError, ConfigError
from ultraep.metrics.reading import SPEED, Reading, Sink
from ultraep.supported import install_extra

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

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


def line_of(values: Mapping[str, float]) -> str:
    """The main values in one line."""
    skipped = values.get("skipped")
    return (
        f"imbalance {values['imbalance_before']:.3f} -> {values['imbalance_after']:.3f} "
        f"(worst {values['imbalance_worst']:.3f}), {values['copies']:.0f} replicas, "
        f"sent {values['weights_bytes_sent'] / 1e6:.1f} MB of weights, "
        f"{values['gradients_bytes_sent'] / 1e6:.1f} MB of gradients"
        + ("" if skipped is None else f", {skipped:.0%} without replicas")
    )


class Log:
    """Logs a line per reading."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger(PREFIX)

    def __call__(self, reading: Reading) -> None:
        self._logger.info("ultraep: step %d: %s", reading.step, line_of(reading.values))


def scalars(target: Any) -> Sink:
    """Return a sink that writes scalars `ultraep/...` by step.

    target: TensorBoard's `SummaryWriter`, a W&B run, or a function of a dict and a step.
    """
    if not (hasattr(target, "add_scalar") or hasattr(target, "log") or callable(target)):
        raise ConfigError(
            f"scalars need an object with add_scalar or log, or a function, got {target!r}"
        )

    def sink(reading: Reading) -> None:
        values = {f"{PREFIX}/{name}": value for name, value in reading.values.items()}
        if hasattr(target, "add_scalar"):
            for name, value in values.items():
                target.add_scalar(name, value, reading.step)
        elif hasattr(target, "log"):
            target.log(values, step=reading.step)
        else:
            target(values, reading.step)

    return sink


def _prometheus() -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise BackendUnavailable(
            f"the exporter needs prometheus-client: {install_extra('metrics')}"
        ) from None
    return prometheus_client


class Exporter:
    """A sink whose last reading is on the page of a registry. None: the registry of the process."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        client = _prometheus()
        self._families = {
            "summary": client.metrics_core.SummaryMetricFamily,
            "counter": client.metrics_core.CounterMetricFamily,
            "gauge": client.metrics_core.GaugeMetricFamily,
        }
        self._last: Reading | None = None
        self._registry: Any = client.REGISTRY if registry is None else registry
        self._registry.register(self)

    def __call__(self, reading: Reading) -> None:
        self._last = reading

    def close(self) -> None:
        """Remove the figures from the page."""
        self._registry.unregister(self)

    def describe(self) -> list[Any]:
        """Return nothing, so that the client accepts a collector without a reading."""
        return []

    def collect(self) -> Iterator[Any]:
        """Metric families for the client; figures of the group only on the page of rank 0."""
        reading = self._last  # another thread may replace it meanwhile
        if reading is None:
            return
        for figure in MEASURED:
            if reading.rank and not figure.per_rank:
                continue
            labels = [figure.label] if figure.label else None
            family: Any = self._families[figure.kind](figure.full_name, figure.help, labels=labels)
            count = [reading.totals.microbatches] if figure.kind == "summary" else []
            for label, value in figure.samples(reading):
                family.add_metric([label] if labels else [], *count, value)
            yield family


def serve(port: int = 9464, address: str = "127.0.0.1") -> Exporter:
    """Serve a page at http://ADDRESS:PORT/metrics until the process ends; return its exporter.

    Every process needs its own port.
    """
    client = _prometheus()
    registry = client.CollectorRegistry()
    exporter = Exporter(registry)
    try:
        client.start_http_server(port, addr=address, registry=registry)
    except OSError as error:
        raise CommunicationError(
            f"cannot serve metrics at {address}:{port}: {error.strerror}; choose another port"
        ) from None
    return exporter
