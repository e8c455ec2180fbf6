"""The server: one process on this machine, with uvicorn. `open_server` refuses before it serves."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ultraep.errors import ConfigError
from ultraep.metrics.hosts import is_loopback, own_names
from ultraep.tools.view.api import Api
from ultraep.tools.view.catalogue import Catalogue
from ultraep.tools.view.guard import MOST_HEADERS, Guard

HEADER_SECONDS = 10.0  # in which a request must have come up to its body
STALLED_SECONDS = 20.0  # in which a client must read what waits for it, some 64 kB
KEEP_SECONDS, FAREWELL_SECONDS = 20, 2
MOST_CONNECTIONS = 256


class Punctual(H11Protocol):
    """Closes connections whose clients neither send a whole request nor read the answer in time."""

    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Wait on, unless that was all of a request."""
        super().data_received(data)
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif not busy and self._timer is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        for timer in (self._timer, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read: give it some time."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request; one that is malformed in its body may be answered already."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _wait(self) -> None:
        self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)


@dataclass
class ViewServer:
    """A server that is ready: its socket is bound, its address is known."""

    url: str
    api: Api
    catalogue: Catalogue
    listener: socket.socket
    server: uvicorn.Server

    def run(self) -> None:
        """Serve until Ctrl-C, or until somebody sets `server.should_exit`."""
        self.catalogue.start()
        try:
            with suppress(KeyboardInterrupt):
                self.server.run(sockets=[self.listener])
        finally:
            self.close()

    def close(self) -> None:
        """Stop all threads, give the port back."""
        self.api.replays.close()
        self.catalogue.close()
        self.listener.close()


def open_server(catalogue: Catalogue, *, host: str = "127.0.0.1", port: int = 0) -> ViewServer:
    """Bind the port; beyond this machine, only with a token that is made here."""
    api, here = Api(catalogue), is_loopback(host)
    token = None if here else secrets.token_urlsafe(24)
    listener = bound_socket(host, port)
    guard = Guard(api.app(), hosts=() if here else {host, *own_names()}, token=token)
    config = uvicorn.Config(
        guard,
        http=Punctual,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_level="error",  # below it, uvicorn comments on requests of clients
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=KEEP_SECONDS,
        timeout_graceful_shutdown=FAREWELL_SECONDS,
        h11_max_incomplete_event_size=MOST_HEADERS,
    )
    name = reachable_name(host)
    shown = f"[{name}]" if ":" in name else name
    url = f"http://{shown}:{listener.getsockname()[1]}/" + ("" if here else f"?token={token}")
    return ViewServer(url, api, catalogue, listener, uvicorn.Server(config))


def reachable_name(host: str) -> str:
    """Return a name to open in a browser: for 0.0.0.0 and ::, an address of this machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    family, far = (socket.AF_INET, "192.0.2.1")
    if address.version == 6:
        family, far = (socket.AF_INET6, "2001:db8::1")
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((far, 9))  # sends nothing, but chooses the interface that leads elsewhere
        found: str = probe.getsockname()[0]
        return found
    return socket.gethostname()


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that listens there; `ConfigError` if the port is taken, or not ours to take."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must lie in 0..65535, got {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host}: {error}") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)  # only what is TCP by name sends at once
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port {port} of {host} cannot be used ({error.strerror}): name another one, "
            "or --port 0 for any"
        ) from None
    listener.listen()
    return listener
