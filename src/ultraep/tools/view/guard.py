"""Guard: checks every request before the application answers it.

A page of another site must not reach the viewer through the user's browser. The guard refuses
foreign host names, requests of other origins, and frames around the page. Beyond this machine it
asks for a token. Requests are bounded in size and time, and so is what waits for a slow client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from http.cookies import CookieError, SimpleCookie
from secrets import compare_digest
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ultraep.metrics.hosts import is_known_host

COOKIE = "ultraep_view"
METHODS = ("GET", "HEAD", "POST")
MOST_BODY, MOST_QUERY, MOST_HEADERS = 16 << 10, 2 << 10, 16 << 10  # bytes
CHUNK = 64 << 10  # bytes of an answer that wait for a client to read
BODY_SECONDS, ANSWER_SECONDS = 10.0, 120.0
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
        self._names = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"the viewer speaks HTTP only, not {scope['type']}")
        refusal = self._refusal(scope)
        answer: ASGIApp = self.app if refusal is None else refusal
        limit, started = asyncio.timeout(ANSWER_SECONDS), False
        late: Response | None = None

        async def send_guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                if late is None:
                    limit.reschedule(None)  # from now on the client takes the time
                started = True
                given = {name.lower() for name, _ in message["headers"]}
                more = [(name, value) for name, value in OWN.items() if name not in given]
                message = {**message, "headers": [*message["headers"], *more]}
            for part in _parts(message):
                await send(part)

        try:
            async with limit:
                body = _bounded(receive) if scope["method"] == "POST" else receive
                await answer(scope, body, send_guarded)
        except TimeoutError:
            late = PlainTextResponse("This takes too long.\n", 503)
        if late is not None and not started:
            await late(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in METHODS:
            return PlainTextResponse("Only GET, HEAD and POST.\n", 405)
        if max(len(scope["query_string"]), len(scope["raw_path"])) > MOST_QUERY:
            return PlainTextResponse("The address is too long.\n", 414)
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEADERS:
            return PlainTextResponse(f"At most {MOST_HEADERS} bytes of headers.\n", 431)
        if not is_known_host(headers.getlist("host"), self._names, local=self.token is None):
            return PlainTextResponse("Not the name of this machine.\n", 421)
        if not _same_origin(headers):
            return PlainTextResponse("Not from another site.\n", 403)
        if scope["method"] == "POST":
            wrong = _wrong_body(headers)
            if wrong is not None:
                return wrong
        return None if self.token is None else self._without_token(scope, headers, self.token)

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


def _parts(message: Message) -> Iterator[Message]:
    """A long body in chunks: the next one is sent when the client has read the last."""
    body = message.get("body", b"")
    ends = range(CHUNK, len(body), CHUNK)
    for end in ends:
        yield {"type": message["type"], "body": body[end - CHUNK : end], "more_body": True}
    yield {**message, "body": body[len(ends) * CHUNK :]} if ends else message


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
    """Give up on a body that does not arrive, as on a client that leaves."""

    async def receive_soon() -> Message:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await receive()
        except TimeoutError:
            return {"type": "http.disconnect"}

    return receive_soon
