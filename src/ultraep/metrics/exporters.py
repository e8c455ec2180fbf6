"""Sinks of readings: a log line, scalars, Prometheus, OpenTelemetry.

The exporters of Prometheus and OpenTelemetry show the last reading and compute nothing when a
scraper asks.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from ultraep.errors import BackendUnavailable, CommunicationError, ConfigError
from ultraep.metrics.figures import MEASURED, PREFIX, Figure
from ultraep.metrics.hosts import is_known_host, is_loopback, own_names
from ultraep.metrics.reading import Reading, Sink

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


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
    """Logs a line per reading, and a warning when an alarm starts or ends."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger(PREFIX)
        self._active: set[str] = set()

    def __call__(self, reading: Reading) -> None:
        self._logger.info("ultraep: step %d: %s", reading.step, line_of(reading.values))
        for name in sorted(reading.alarms.keys() - self._active):
            self._logger.warning("ultraep: %s: %s", name, reading.alarms[name])
        for name in sorted(self._active - reading.alarms.keys()):
            self._logger.warning("ultraep: %s: ended at step %d", name, reading.step)
        self._active = set(reading.alarms)


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
        values |= {f"{PREFIX}/alarm/{name}": 1.0 for name in reading.alarms}
        if hasattr(target, "add_scalar"):
            for name, value in values.items():
                target.add_scalar(name, value, reading.step)
        elif hasattr(target, "log"):
            target.log(values, step=reading.step)
        else:
            target(values, reading.step)

    return sink


class Telemetry:
    """A sink whose last reading a meter of OpenTelemetry shows. None: the meter of the process.

    Imbalances are gauges: means since the previous reading.
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
        meter = meter or metrics.get_meter(PREFIX)
        for figure in MEASURED:
            create = meter.create_observable_gauge
            if figure.kind == "counter":
                create = meter.create_observable_counter
            create(figure.full_name, [partial(self._observe, figure)], description=figure.help)

    def __call__(self, reading: Reading) -> None:
        self._last = reading

    def _observe(self, figure: Figure, _: Any) -> list[Any]:
        if self._last is None:
            return []
        values = figure.samples(self._last)
        if figure.kind == "summary":
            values = [(self._last.policy, self._last.values[figure.name])]
        return [
            self._observation(value, {figure.label: label} if figure.label else {})
            for label, value in values
        ]


# -- Prometheus ----------------------------------------------------------------------------------


def _prometheus() -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise BackendUnavailable(
            "the exporter needs prometheus-client: pip install 'ultraep[metrics]'"
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


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 10.0  # seconds that a client may keep a thread waiting

    def log_message(self, *_: Any) -> None:
        """Print nothing: the terminal belongs to the training."""


def serve(port: int = 9464, address: str = "127.0.0.1", *, hosts: Iterable[str] = ()) -> Exporter:
    """Serve a page at http://ADDRESS:PORT/metrics until the process ends; return its exporter.

    Every process needs its own port. The `Host` header of a request must be an address, localhost
    or a name of this machine.

    hosts: further host names that scrapers may use, for example the name of a proxy.
    """
    client = _prometheus()
    registry = client.CollectorRegistry()
    exporter = Exporter(registry)
    local = is_loopback(address)
    names = {host.lower() for host in hosts} | (set() if local else own_names())
    page = _guarded(client.make_wsgi_app(registry), names, local=local)
    server_class = _Server6 if ":" in address else _Server
    try:
        server = make_server(address, port, page, server_class, _Handler)
    except OSError as error:
        raise CommunicationError(
            f"cannot serve metrics at {address}:{port}: {error.strerror}; choose another port"
        ) from None
    threading.Thread(target=server.serve_forever, name="ultraep metrics", daemon=True).start()
    return exporter


def _guarded(app: Any, names: set[str], *, local: bool) -> Callable[..., Iterable[bytes]]:
    """Answer only requests whose Host header names this machine."""

    def respond(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if is_known_host([environ.get("HTTP_HOST", "")], names, local=local):
            page: Iterable[bytes] = app(environ, start_response)
            return page
        start_response("421 Misdirected Request", [("Content-Type", "text/plain")])
        return [b"The Host header does not name this machine; pass hosts= to metrics.serve.\n"]

    return respond
