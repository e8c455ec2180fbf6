"""Clients that send nonsense, or never read: an answer or an end, nothing on the terminal."""

import contextlib
import resource
import socket
import time

import pytest

from view.runs import served, wait_for

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from ultraep.tools.view import server as server_module

HEAD = b"Host: localhost\r\n"
GET = b"GET /api/state HTTP/1.1\r\n" + HEAD
POST = b"POST /api/replays HTTP/1.1\r\n" + HEAD + b"Content-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def posted(body):
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


REQUESTS = {  # what is sent at once, what is sent when that is answered, the status
    "5,000 digits": (b"GET /report/" + b"9" * 5000 + b" HTTP/1.1\r\n" + HEAD + b"\r\n", b"", 414),
    "1,500 digits": (b"GET /report/" + b"9" * 1500 + b" HTTP/1.1\r\n" + HEAD + b"\r\n", b"", 400),
    "digits of a replay": (
        b"GET /api/replays/%s HTTP/1.1\r\n" % (b"9" * 1500) + HEAD + b"\r\n",
        b"",
        400,
    ),
    "a bad chunk": (CHUNKED + b"zz\r\n", b"", 400),
    "a bad chunk, later": (CHUNKED, b"zz\r\nabc", 411),
    "a chunk that is too long": (CHUNKED + b"5\r\nab", b"cdefgh\r\nxx", 411),
    "chunks and a length": (
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\r\nGET",
        400,
    ),
    "a bad chunk without need": (GET + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"zz", 400),
    "a header of 100 kB": (GET + b"X: " + b"a" * 100_000 + b"\r\n\r\n", b"", 431),
    "10,000 headers": (GET + b"X: a\r\n" * 10_000 + b"\r\n", b"", 431),
    "a websocket": (
        GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n",
        b"",
        200,
    ),
    "another protocol": (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"", 400),
    "a large number": (posted(b'{"trace": 0, "policy": "none", "tolerance": 1e999}'), b"", 400),
    "a larger one": (
        posted(b'{"trace": 0, "policy": "none", "slots": 1%s}' % (b"0" * 400)),
        b"",
        400,
    ),
    "one that is no number": (
        posted(b'{"trace": 0, "policy": "none", "tolerance": NaN}'),
        b"",
        400,
    ),
}


def connected(server):
    return socket.create_connection(("127.0.0.1", server.listener.getsockname()[1]), 30)


def status_of(server, first, later):
    with connected(server) as raw:
        raw.sendall(first)
        status = int(raw.recv(65536).split()[1])
        with contextlib.suppress(ConnectionError):  # it may be closed already
            raw.sendall(later)
        return status


def test_every_request_is_answered_in_one_sentence(run, capfd):
    with served(run) as server:
        found = {name: status_of(server, *parts[:2]) for name, parts in REQUESTS.items()}
        for begun in (posted(b"{}")[:-1], GET):  # clients that leave in the middle of a request
            with connected(server) as raw:
                raw.sendall(begun)
        assert status_of(server, GET + b"\r\n", b"") == 200
    assert found == {name: status for name, (*_, status) in REQUESTS.items()}
    assert capfd.readouterr().err == ""


def test_clients_that_never_read_hold_little_and_are_sent_away(run, monkeypatch):
    """Each asks for 4.5 MB; only what fits into buffers is taken out of the file."""
    monkeypatch.setattr(server_module, "STALLED_SECONDS", 0.5)
    with served(run) as server:
        assert len(server.api.files["plotly.js"][0]) > 2 << 20
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        idle = [connected(server) for _ in range(60)]
        for raw in idle:
            raw.sendall(b"GET /static/plotly.js HTTP/1.1\r\n" + HEAD + b"\r\n")
        wait_for(lambda: server.server.server_state.total_requests == 0 and not connections(server))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown << 10 < 60 << 20
        for raw in idle:
            raw.close()
        assert status_of(server, GET + b"\r\n", b"") == 200


def connections(server):
    return list(server.server.server_state.connections)


def test_a_slow_reader_gets_all_of_it(run, monkeypatch):
    """Time that a client takes to read is not time that the answer takes."""
    from ultraep.tools.view import guard

    monkeypatch.setattr(guard, "ANSWER_SECONDS", 0.3)
    with served(run) as server, connected(server) as raw:
        wanted = len(server.api.files["plotly.js"][0])
        raw.sendall(b"GET /static/plotly.js HTTP/1.1\r\nConnection: close\r\n" + HEAD + b"\r\n")
        began, content = time.monotonic(), b""
        while more := raw.recv(1 << 20):
            content += more
            if time.monotonic() - began < 0.6:
                time.sleep(0.1)
        assert len(content.partition(b"\r\n\r\n")[2]) == wanted
