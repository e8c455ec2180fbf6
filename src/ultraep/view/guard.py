"""Guard: who may ask, how much, and for how long. It stands before everything the server answers.

A page of another site must not reach the viewer through the user's browser: names that lead here by
somebody else's DNS, requests that another origin makes, frames around the page are all refused. Who
listens beyond this machine needs a token.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from secrets import compare_digest
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "ultraep_view"
METHODS = ("GET", "HEAD", "POST")
MOST_BODY, MOST_QUERY = 16 << 10, 2 << 10  # bytes
BODY_SECONDS, ANSWER_SECONDS = 10.0, 120.0
NAME = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::(\d{1,5}))?")
OWN = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self' "
    b"'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"permissions-policy": b"camera=(), microphone=(), geolocation=()",
}


class Guard:
    """Refuses, or hands on to the application; its headers are on every answer."""

    def __init__(
        self, app: ASGIApp, *, hosts: Iterable[str] = (), token: str | None = None
    ) -> None:
        self.app, self.token = app, token
        self._hosts = {"localhost", *(host.lower() for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"the viewer speaks HTTP only, not {scope['type']}")
        refusal = self._refusal(scope)
        answer: ASGIApp = self.app if refusal is None else refusal
        started = False

        async def send_guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                given = {name.lower() for name, _ in message["headers"]}
                more = [(name, value) for name, value in OWN.items() if name not in given]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await answer(scope, _bounded(receive), send_guarded)
        except TimeoutError:
            if not started:
                late = PlainTextResponse("This takes too long.\n", 503)
                await late(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in METHODS:
            return PlainTextResponse("Only GET, HEAD and POST.\n", 405)
        if len(scope.get("query_string", b"")) > MOST_QUERY:
            return PlainTextResponse("The address is too long.\n", 414)
        if not self._known_host(headers.getlist("host")):
            return PlainTextResponse("Not the name of this machine.\n", 421)
        if not _same_origin(headers):
            return PlainTextResponse("Not from another site.\n", 403)
        if scope["method"] == "POST":
            wrong = _wrong_body(headers)
            if wrong is not None:
                return wrong
        return None if self.token is None else self._without_token(scope, headers, self.token)

    def _known_host(self, named: list[str]) -> bool:
        """An address is no name that somebody's DNS could lead here."""
        match = NAME.fullmatch(named[0]) if len(named) == 1 else None
        if match is None:
            return False
        name = match[1].lower()
        if name in self._hosts:
            return True
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return address.is_loopback or self.token is not None

    def _without_token(self, scope: Scope, headers: Headers, token: str) -> Response | None:
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"))
        given = [value for name, value in query if name == "token"]
        if given and compare_digest(given[0].encode(), token.encode()):
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            found = RedirectResponse(scope["path"] + f"?{rest}" * bool(rest), 303)
            found.set_cookie(COOKIE, token, httponly=True, samesite="strict")
            return found
        if compare_digest(_cookie(headers).encode(), token.encode()):
            return None
        text = "A token is needed: open the address that `ultraep view` has printed.\n"
        return PlainTextResponse(text, 401)


def own_names() -> set[str]:
    """Names by which others may know this machine."""
    return {socket.gethostname(), socket.getfqdn()}


def _cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _same_origin(headers: Headers) -> bool:
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return False
    origin = headers.get("origin")
    return origin is None or origin == f"http://{headers['host']}"


def _wrong_body(headers: Headers) -> Response | None:
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return PlainTextResponse("Only JSON.\n", 415)
    length = headers.get("content-length", "")
    if not length.isdecimal():
        return PlainTextResponse("How long is it?\n", 411)
    if len(length) > 9 or int(length) > MOST_BODY:
        return PlainTextResponse(f"At most {MOST_BODY} bytes.\n", 413)
    return None


def _bounded(receive: Receive) -> Receive:
    """A body that does not come is not waited for."""

    async def receive_soon() -> Message:
        async with asyncio.timeout(BODY_SECONDS):
            return await receive()

    return receive_soon
