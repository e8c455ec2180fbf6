"""The server: answers, refused requests, and slow clients."""

import shutil
import socket

import httpx
import numpy as np
import pytest

from ultraep import ConfigError
from ultraep_tools.view.catalogue import Catalogue
from ultraep_tools.view.server import ViewServer
from view.runs import LAYERS, MOMENTS, served

pytest.importorskip("plotly")
HEAD = b"Host: localhost\r\n"
GET = b"GET /api/state HTTP/1.1\r\n" + HEAD


@pytest.fixture(scope="module")
def server(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(run, folder / "run")
    (folder / "secret.txt").write_text("secret")
    with served(folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as session:
        yield session


def ask(client, name, **parameters):
    answer = client.get(f"/api/{name}", params={"trace": "run"} | parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_numbers_of_the_trace(client, trace):
    state = ask(client, "state")
    assert state["items"][0]["records"] == len(trace)
    whole = ask(client, "overview")
    assert whole["totals"]["before"] == pytest.approx(trace.imbalance_before.mean(), abs=1e-6)
    key = dict(zip(("step", "layer", "microbatch"), ask(client, "worst")["key"], strict=True))
    record, worst = ask(client, "record", **key), int(trace.imbalance_before.argmax())
    assert record["rows"] == trace.slot_rows[worst].tolist()
    assert record["around"]["moments"] == MOMENTS
    stages, experts = record["stages"]["forward"], trace.header.stages.index("experts")
    seconds = np.array(stages["seconds"])[:, stages["stages"].index("experts")]
    np.testing.assert_allclose(seconds, trace.seconds[worst][:, experts], atol=1e-7)
    assert ask(client, "worst", **{"from": 2, "to": 3, "layer": 1})["key"] == [1, 1, 0]
    assert ask(client, "overview", **{"from": 500, "to": 600})["totals"]["records"] == 0
    assert whole["training"] == {}
    slowest = trace.seconds.sum(axis=2).mean()
    rows = trace.loads.sum(axis=(1, 2)).mean()
    assert whole["rows_per_second"] == pytest.approx(rows / slowest, rel=1e-5)
    for stage, seconds in whole["stages"].items():
        assert seconds == pytest.approx(trace.stage_means[stage], rel=1e-5)


WRONG = {
    "overview?trace=other": "trace 'other' is not open; open are: run",
    "overview?trace=run&from=" + "9" * 30: "from must be an integer",
    "record?trace=run&step=999&layer=0&microbatch=0": "no such record",
}


@pytest.mark.parametrize("path", WRONG)
def test_a_wrong_request_is_one_sentence(client, path):
    answer = client.get(f"/api/{path}")
    assert answer.status_code == 400
    assert WRONG[path] in answer.json()["error"]


ORIGINS = {
    "another name": ({"host": "evil.example"}, 421),
    "another name and port": ({"host": "evil.example:80"}, 421),
    "invalid name": ({"host": "127.0.0.1@evil"}, 421),
    "another machine": ({"host": "192.168.1.2"}, 421),
    "another origin": ({"origin": "http://evil.example"}, 403),
    "null origin": ({"origin": "null"}, 403),
    "another port": ({"origin": "http://127.0.0.1:1"}, 403),
    "cross-site": ({"sec-fetch-site": "cross-site"}, 403),
    "same site": ({"sec-fetch-site": "same-site"}, 403),
    "this machine": ({"host": "LOCALHOST:99"}, 200),
}


@pytest.mark.parametrize(("headers", "status"), ORIGINS.values(), ids=ORIGINS)
def test_requests_from_other_sites_are_refused(client, headers, status):
    for path in ("/", "/api/state", "/static/plotly.js"):
        answer = client.get(path, headers=headers)
        assert answer.status_code == status
        assert "content-security-policy" in answer.headers


def test_headers_are_strict(client):
    for path in ("/", "/static/view.js", "/api/state", "/nothing"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "server" not in headers


@pytest.mark.parametrize(
    "path",
    [
        *("/static/../api.py", "/static/%2e%2e/api.py", "/static/..%2f..%2fapi.py", "/secret.txt"),
        *("/static//etc/passwd", "/static/%2fetc%2fpasswd", "/static/x%00.js", "/static/"),
        *("/run/header.json", "/api/../secret.txt", "//secret.txt", "/api/_trace", "/api/answer"),
        "http://evil/api/state",
    ],
)
def test_nothing_else_is_served(server, path):
    """Sent as is: HTTP clients would normalise such addresses."""
    answer = exchange(server, f"GET {path} HTTP/1.1\r\n".encode() + HEAD)
    assert int(answer.split()[1]) in (200, 400, 404)
    assert b"secret" not in answer.partition(b"\r\n\r\n")[2]
    assert b"ultraep-trace" not in answer


def exchange(server, head):
    with socket.create_connection(("127.0.0.1", server.port), 30) as raw:
        raw.sendall(head + b"\r\n")
        answer = b""
        while more := raw.recv(65536):
            answer += more
    return answer


def test_a_port_that_cannot_be_used_is_one_sentence(server, run):
    for port, words in ((server.port, f"port {server.port} cannot be used"), (70000, "--port")):
        with pytest.raises(ConfigError, match=words):
            ViewServer(Catalogue([run]), port)


MALFORMED = {  # what is sent, and the status
    "two hosts": (GET + b"Host: evil.example\r\n", 421),
    "no host": (b"GET /api/state HTTP/1.1\r\n", 421),
    "a websocket": (GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n", 200),
    "another method": (b"POST /api/state HTTP/1.1\r\n" + HEAD, 501),
}


def test_malformed_requests_are_answered(server, client, capfd):
    statuses = {
        name: int(exchange(server, head).split()[1]) for name, (head, _) in MALFORMED.items()
    }
    assert statuses == {name: status for name, (_, status) in MALFORMED.items()}
    with socket.create_connection(("127.0.0.1", server.port), 30) as raw:
        raw.sendall(GET)  # a client that leaves in the middle of a request
    assert client.get("/api/state").status_code == 200
    assert capfd.readouterr().err == ""


def test_slow_clients_do_not_block_others(server, client):
    slow = [socket.create_connection(("127.0.0.1", server.port), 30) for _ in range(40)]
    for number, raw in enumerate(slow):  # the last kind asks for a large file, and reads nothing
        large = b"GET /static/plotly.js HTTP/1.1\r\n" + HEAD + b"\r\n"
        raw.sendall((b"", b"GET / HT", GET, large)[number % 4])
    assert ask(client, "overview")["totals"]["records"] == MOMENTS * LAYERS
    for raw in slow:
        raw.close()
