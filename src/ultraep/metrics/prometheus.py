"""An exporter for Prometheus, through its official client.

A page shows the last reading; nobody computes or waits when it is asked for.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import ultraep.metrics.names as names
from ultraep.errors import BackendUnavailable, CommunicationError
from ultraep.metrics.alarms import MEANING
from ultraep.metrics.hosts import is_known_host, is_loopback, own_names
from ultraep.metrics.names import Exported
from ultraep.metrics.reading import Reading

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

HINT = "the exporter needs prometheus-client: pip install 'ultraep[metrics]'"


class Exporter:
    """A sink whose last reading is on the page of a registry; None: that of the process.

    close: take it off the page.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            from prometheus_client import REGISTRY
            from prometheus_client import metrics_core as families
        except ImportError:
            raise BackendUnavailable(HINT) from None
        self._families: Any = families
        self._last: Reading | None = None
        self._registry = REGISTRY if registry is None else registry
        self._registry.register(self)  # type: ignore[arg-type, unused-ignore]

    def __call__(self, reading: Reading) -> None:
        self._last = reading

    def close(self) -> None:
        """Leave the page."""
        self._registry.unregister(self)  # type: ignore[arg-type, unused-ignore]

    def describe(self) -> list[Any]:
        """Nothing yet, so that it can join before the first reading."""
        return []

    def collect(self) -> Iterator[Any]:
        """The page, for the client; what is of the group stands on that of its first rank."""
        reading = self._last  # another thread may replace it meanwhile
        if reading is None:
            return
        totals = reading.totals
        if reading.rank == 0:
            yield from self._of_group(reading)
        yield self._one(names.WEIGHTS_SENT, totals.weights)
        yield self._one(names.GRADIENTS_SENT, totals.gradients)
        yield self._one(names.TIMED, totals.timed)
        yield self._many(names.STAGE_SECONDS, totals.seconds)

    def _of_group(self, reading: Reading) -> Iterator[Any]:
        totals = reading.totals
        sums = {names.IMBALANCE_BEFORE: totals.before, names.IMBALANCE_AFTER: totals.after}
        for figure, total in sums.items():
            family = self._family(figure, "SummaryMetricFamily")
            family.add_metric([reading.policy], count_value=totals.microbatches, sum_value=total)
            yield family
        yield self._one(names.IMBALANCE_WORST, totals.worst)
        yield self._one(names.COPIES_PLANNED, totals.copies)
        yield self._one(names.LEFT_ALONE, totals.skipped)
        yield self._many(names.ALARM, {name: float(name in reading.alarms) for name in MEANING})

    def _family(self, figure: Exported, kind: str) -> Any:
        labels = [figure.label] if figure.label else None
        return getattr(self._families, kind)(figure.name, figure.help, labels=labels)

    def _one(self, figure: Exported, value: float) -> Any:
        family = self._family(figure, _kind(figure))
        family.add_metric([], value)
        return family

    def _many(self, figure: Exported, values: dict[str, float]) -> Any:
        family = self._family(figure, _kind(figure))
        for label, value in values.items():
            family.add_metric([label], value)
        return family


def _kind(figure: Exported) -> str:
    return {"counter": "CounterMetricFamily", "gauge": "GaugeMetricFamily"}[figure.kind]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 10.0  # seconds that a client may keep a thread waiting

    def log_message(self, *_: Any) -> None:
        """Print nothing: the terminal belongs to the training."""


def serve(port: int = 9464, address: str = "127.0.0.1", *, hosts: Iterable[str] = ()) -> Exporter:
    """Return an exporter with a page of its own at http://ADDRESS:PORT/metrics.

    The page is served until the process ends. Every process needs its own port. A request must
    name an address, localhost or this machine in its `Host` header.

    hosts: more host names that scrapers may use, such as the name of a service in front of it.
    """
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app
    except ImportError:
        raise BackendUnavailable(HINT) from None
    registry = CollectorRegistry()
    exporter = Exporter(registry)
    local = is_loopback(address)
    names = {host.lower() for host in hosts} | (set() if local else own_names())
    page = _guarded(make_wsgi_app(registry), names, local=local)
    kind = _Server6 if ":" in address else _Server
    try:
        server = make_server(address, port, page, server_class=kind, handler_class=_Handler)
    except OSError as error:
        raise CommunicationError(f"{address}:{port} cannot be served: {error.strerror}") from None
    threading.Thread(target=server.serve_forever, name="ultraep metrics", daemon=True).start()
    return exporter


def _guarded(app: Any, names: set[str], *, local: bool) -> Callable[..., Iterable[bytes]]:
    """Answer only requests that name this machine."""

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if is_known_host([environ.get("HTTP_HOST", "")], names, local=local):
            found: Iterable[bytes] = app(environ, start_response)
            return found
        start_response("421 Misdirected Request", [("Content-Type", "text/plain")])
        return [b"The Host header does not name this machine: pass hosts= to metrics.serve.\n"]

    return answer
