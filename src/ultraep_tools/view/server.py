"""The server: one process on this machine, one thread per connection, standard library only.

A page of another site must not reach the viewer through the user's browser. The server refuses
foreign host names, requests from other origins, and frames around the page. If it listens beyond
this machine, it requires a token. `http.server` limits the size of requests; this module limits the
number of clients, and the time for which a client may send and read nothing.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import sys
import threading
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from ultraep.errors import ConfigError
from ultraep_tools.view.api import Answer, Api
from ultraep_tools.view.catalogue import Catalogue
from ultraep_tools.view.hosts import is_known_host, is_loopback, own_names

COOKIE = "ultraep_view"
CHUNK = 64 << 10  # bytes that a client must read before the timeout
MOST_CONNECTIONS = 128
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' "
    "'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; frame-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: ViewServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise the body waits 40 ms for an ACK of the headers
    timeout = 20.0  # seconds

    def do_GET(self) -> None:
        if self.server.stopped:  # connections stay open longer than the server
            self.close_connection = True
            return
        address = urlsplit(self.path)
        answer = self._refusal(address.path, parse_qsl(address.query))
        if answer is not None:
            self.close_connection = True  # a body may follow
        else:
            answer = self.server.api.answer(address.path, dict(parse_qsl(address.query)))
            if self.headers.get("if-none-match") == answer.headers.get("etag", ""):
                answer = Answer(b"", 304, answer.headers)
        self._send(answer)

    do_HEAD = do_GET  # noqa: N815  name of http.server

    def send_error(self, code: int, message: str | None = None, _: str | None = None) -> None:
        """Answer a malformed request, or one with an unknown method."""
        self.close_connection, self.request_version = True, self.protocol_version
        self._send(Answer.text(message or "Bad request", 405 if code == 501 else code))

    def log_message(self, format: str, *values: Any) -> None:  # noqa: A002
        """Print nothing about requests."""

    def _send(self, answer: Answer) -> None:
        content = answer.content
        self.send_response_only(answer.status)
        for name, value in (HEADERS | answer.headers).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        if self.close_connection:
            self.send_header("connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            for begin in range(0, len(content), CHUNK):
                self.wfile.write(memoryview(content)[begin : begin + CHUNK])

    def _refusal(self, path: str, query: list[tuple[str, str]]) -> Answer | None:
        hosts, token = self.headers.get_all("host", []), self.server.token
        if not is_known_host(hosts, self.server.names, local=token is None):
            return Answer.text("The host name is not a name of this machine", 421)
        same_origin = self.headers.get("origin", f"http://{hosts[0]}") == f"http://{hosts[0]}"
        same_site = self.headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        if not (same_origin and same_site):
            return Answer.text("Requests from other sites are refused", 403)
        if "content-length" in self.headers or "transfer-encoding" in self.headers:
            return Answer.text("Requests with a body are refused", 413)
        if token is None or self._has_cookie(token):
            return None
        if not _equal(dict(query).get("token", ""), token):
            return Answer.text("Open the address with the token that `ultraep view` printed", 401)
        rest = urlencode([pair for pair in query if pair[0] != "token"])
        cookie = f"{COOKIE}={token}; HttpOnly; SameSite=strict; Path=/"
        location = f"{path}?{rest}" if rest else path
        return Answer(b"", 303, {"location": location, "set-cookie": cookie})

    def _has_cookie(self, token: str) -> bool:
        try:
            cookies = SimpleCookie(self.headers.get("cookie", ""))
        except CookieError:
            return False
        return COOKIE in cookies and _equal(cookies[COOKIE].value, token)


def _equal(text: str, token: str) -> bool:
    return secrets.compare_digest(text.encode(errors="replace"), token.encode())


class ViewServer(ThreadingHTTPServer):
    """A server that is ready: its socket is bound, its address is known."""

    daemon_threads, block_on_close = True, False

    def __init__(self, catalogue: Catalogue, host: str, port: int) -> None:
        self.catalogue, self.api = catalogue, Api(catalogue)
        super().__init__(("", 0), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening_socket(host, port)
        self.port: int = self.socket.getsockname()[1]
        local, name = is_loopback(host), reachable_name(host)
        self.token = None if local else secrets.token_urlsafe(24)
        self.names = set() if local else {host.lower(), *own_names()}
        bracketed = f"[{name}]" if ":" in name else name
        self.url = f"http://{bracketed}:{self.port}/" + ("" if local else f"?token={self.token}")
        self.stopped = False
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def run(self) -> None:
        """Serve until Ctrl-C, or until another thread calls `shutdown`."""
        self.catalogue.start()
        try:
            with suppress(KeyboardInterrupt):
                self.serve_forever(poll_interval=0.1)
        finally:
            self.stopped = True
            self.api.replays.close()
            self.catalogue.close()
            self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in its own thread; close it if there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect early; print other errors."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def reachable_name(host: str) -> str:
    """Return a name to open in a browser: for 0.0.0.0 and ::, an address of this machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    family, far = socket.AF_INET, "192.0.2.1"
    if address.version == 6:
        family, far = socket.AF_INET6, "2001:db8::1"
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((far, 9))  # sends nothing, but selects the outgoing interface
        name: str = probe.getsockname()[0]
        return name
    return socket.gethostname()


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address; raise `ConfigError` if it cannot be used."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must lie in 0..65535, got {port}")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = addresses[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host}: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port {port} of {host} cannot be used ({error.strerror}): choose another port, "
            "or --port 0 for any free one"
        ) from None
    listener.listen()
    return listener
