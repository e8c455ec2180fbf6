"""The server: one process, one thread per connection, standard library only.

It listens on this machine only. A page of another site must not reach it through the user's
browser: it refuses foreign host names (DNS rebinding), requests from other origins, and frames
around the page.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ultraep.errors import ConfigError
from ultraep_tools.view.api import Answer, Api
from ultraep_tools.view.catalogue import Catalogue

ADDRESS = "127.0.0.1"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' "
    "'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: ViewServer

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = dict(parse_qsl(address.query))
        self._send(self._refusal() or self.server.api.answer(address.path, query))

    def log_message(self, format: str, *values: Any) -> None:  # noqa: A002
        """Print nothing about requests."""

    def _send(self, answer: Answer) -> None:
        self.send_response_only(answer.status)
        headers = {"content-type": answer.content_type, "content-length": str(len(answer.content))}
        for name, value in (HEADERS | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.content)

    def _refusal(self) -> Answer | None:
        hosts = self.headers.get_all("host", [])
        if len(hosts) != 1 or hosts[0].lower().split(":")[0] not in (ADDRESS, "localhost"):
            return Answer.text("Open this page as localhost", 421)
        same_origin = self.headers.get("origin", f"http://{hosts[0]}") == f"http://{hosts[0]}"
        same_site = self.headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        if not (same_origin and same_site):
            return Answer.text("Requests from other sites are refused", 403)
        return None


class ViewServer(ThreadingMixIn, TCPServer):
    """A server that is ready: its socket is bound, its address is known."""

    allow_reuse_address = daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, catalogue: Catalogue, port: int) -> None:
        self.api = Api(catalogue)
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be used ({error.strerror}): choose another port, or --port 0 "
                "for any free one"
            ) from None
        except OverflowError:
            raise ConfigError(f"--port must lie in 0..65535, got {port}") from None
        self.port: int = self.server_address[1]
        self.url = f"http://{ADDRESS}:{self.port}/"

    def run(self) -> None:
        """Serve until Ctrl-C, or until another thread calls `shutdown`."""
        with self, suppress(KeyboardInterrupt):
            self.serve_forever(poll_interval=0.1)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect early; print other errors."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
