"""The server: answers, refused requests, and slow clients."""

import shutil
import socket
import time

import httpx
import numpy as np
import pytest

from ultraep import ConfigError
from ultraep_tools.view import server as server_module
from ultraep_tools.view.server import COOKIE, listening_socket
from ultraep_tools.view.traces import FolderTrace
from view.runs import LAYERS, MOMENTS, served, wait_for

pytest.importorskip("plotly")
HEAD = b"Host: localhost\r\n"
GET = b"GET /api/state HTTP/1.1\r\n" + HEAD


@pytest.fixture(scope="module")
def server(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(run, folder / "run")
    (folder / "report.html").write_text("<p>a report</p>")
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


def connected(server):
    return socket.create_connection(("127.0.0.1", server.port), 30)


def test_the_numbers_of_the_trace(client, trace):
    state = ask(client, "state")
    assert [item["kind"] for item in state["items"]] == ["trace", "report"]
    assert state["items"][0]["records"] == len(trace)
    whole = ask(client, "overview")
    assert whole["totals"]["before"] == pytest.approx(trace.imbalance_before.mean(), abs=1e-6)
    key = dict(zip(("step", "layer", "microbatch"), whole["worst"], strict=True))
    record, worst = ask(client, "record", **key), int(trace.imbalance_before.argmax())
    assert record["rows"] == trace.slot_rows[worst].tolist()
    assert record["around"]["moments"] == MOMENTS
    stages, experts = record["stages"]["forward"], trace.header.stages.index("experts")
    seconds = np.array(stages["seconds"])[:, stages["stages"].index("experts")]
    np.testing.assert_allclose(seconds, trace.seconds[worst][:, experts], atol=1e-7)
    assert ask(client, "worst", **{"from": 2, "to": 3, "layer": 1})["key"] == [1, 1, 0]
    assert np.sum(ask(client, "heat", value="copies")["z"]) == trace.num_copies.sum()
    assert ask(client, "overview", **{"from": 500, "to": 600})["totals"]["records"] == 0
    assert ask(client, "training") == {}


WRONG = {
    "overview?trace=other": "trace 'other' is not open; open are: run",
    "overview?trace=report.html": "trace 'report.html' is not open",
    "overview?trace=run&points=1000000000": "points must be an integer in 2..2000",
    "overview?trace=run&from=" + "9" * 30: "from must be an integer",
    "heat?trace=run&value=__class__": "value must be one of",
    "record?trace=run&step=999&layer=0&microbatch=0": "no such record",
    "replay?number=5": "replay 5 does not exist",
    "replay?number=" + "9" * 1500: "number must be an integer",
    "replay?trace=run": "unknown policy ''",
    "replay?trace=run&policy=magic": "unknown policy 'magic'",
    "replay?trace=run&policy=none&ranks=3": "4 recorded ranks cannot become 3",
    "replay?trace=run&policy=eplb&history=0": "history must be at least 1",
    "replay?trace=run&policy=none&slots=-1": "slots must be an integer",
    "replay?trace=run&policy=none&tolerance=x": "tolerance must be a number, got 'x'",
    "replay?trace=run&policy=none&tolerance=nan": "tolerance must lie",
    "replay?trace=run&policy=none&tolerance=1e999": "tolerance must lie",
    "stop?number=99": "replay 99 does not exist",
}


@pytest.mark.parametrize("path", WRONG)
def test_a_wrong_request_is_one_sentence(client, path):
    answer = client.get(f"/api/{path}")
    assert answer.status_code == 400
    assert WRONG[path] in answer.json()["error"]


def replay(client, **settings):
    number, ended = ask(client, "replay", **settings)["number"], ("done", "failed", "stopped")
    wait_for(lambda: ask(client, "replay", number=number)["state"] in ended, 120)
    return ask(client, "replay", number=number)


def test_a_replay_as_recorded_is_the_recording(client, trace):
    job = replay(client, policy="ultraep")
    assert (job["state"], job["done"], job["total"]) == ("done", len(trace), len(trace))
    recorded, replayed = (job["answer"][name]["lines"] for name in ("recorded", "replayed"))
    assert recorded["after"] == replayed["after"]
    assert replay(client, policy="ultraep")["number"] == job["number"]
    none = replay(client, policy="none", ranks=2, slots=2)["answer"]
    assert (none["settings"]["ranks"], none["replayed"]["totals"]["copies"]) == (2, 0)
    assert none["replayed"]["lines"]["before"] == none["replayed"]["lines"]["after"]


def test_a_replay_can_be_stopped(client, monkeypatch):
    planned = FolderTrace.planned

    def slowly(self, key):
        time.sleep(0.05)
        return planned(self, key)

    monkeypatch.setattr(FolderTrace, "planned", slowly)
    job = ask(client, "replay", policy="echo")
    wait_for(lambda: ask(client, "replay", number=job["number"])["done"] > 1)
    ask(client, "stop", number=job["number"])
    wait_for(lambda: ask(client, "replay", number=job["number"])["state"] == "stopped")
    job = ask(client, "replay", number=job["number"])
    assert 1 < job["done"] < job["total"]
    assert job["answer"]["replayed"]["totals"]["records"] == job["done"]


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
    "this machine, IPv6": ({"host": "[::1]"}, 200),
}


@pytest.mark.parametrize(("headers", "status"), ORIGINS.values(), ids=ORIGINS)
def test_requests_from_other_sites_are_refused(client, headers, status):
    for path in ("/", "/api/state", "/static/plotly.js", "/report?name=report.html"):
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
    report = client.get("/report?name=report.html")
    policy = report.headers["content-security-policy"]
    assert report.text == "<p>a report</p>"
    assert policy.startswith("sandbox allow-scripts allow-downloads;")
    assert "allow-same-origin" not in policy


@pytest.mark.parametrize(
    "path",
    [
        *("/static/../api.py", "/static/%2e%2e/api.py", "/static/..%2f..%2fapi.py", "/secret.txt"),
        *("/static//etc/passwd", "/static/%2fetc%2fpasswd", "/report?name=../secret.txt"),
        *("/report?name=secret.txt", "/report?name=run/header.json", "/static/x%00.js"),
        *("/run/header.json", "/api/../secret.txt", "//secret.txt", "/static/", "/report/"),
        *("/api/_trace", "/api/app", "http://evil/api/state"),
    ],
)
def test_nothing_else_is_served(server, path):
    """Sent as is: HTTP clients would normalise such addresses."""
    answer = exchange(server, f"GET {path} HTTP/1.1\r\nConnection: close\r\n".encode() + HEAD)
    assert int(answer.split()[1]) in (200, 400, 404)
    assert b"secret" not in answer.partition(b"\r\n\r\n")[2] or b"is not open" in answer
    assert b"ultraep-trace" not in answer


def exchange(server, head, body=b""):
    with connected(server) as raw:
        raw.sendall(head + b"\r\n" + body)
        answer = b""
        while more := raw.recv(65536):
            answer += more
    return answer


def test_beyond_this_machine_a_token_is_required(run):
    with served(run, host="0.0.0.0") as server:
        address, _, token = server.url.partition("?token=")
        assert len(token) >= 32
        assert "0.0.0.0" not in address, "browsers cannot open that"
        base = f"http://127.0.0.1:{server.port}/"
        with httpx.Client(base_url=base, trust_env=False, timeout=30) as client:
            for path in ("/", "/api/state", "/static/view.js", "/?token=x", f"/?token={token}x"):
                assert client.get(path).status_code == 401
            wrong = {"cookie": f"{COOKIE}=wrong; {COOKIE}=%"}
            assert client.get("/api/state", headers=wrong).status_code == 401
            assert client.get("/", headers={"host": "evil.example"}).status_code == 421
            entered = client.get(f"/?trace=0&token={token}")
            assert (entered.status_code, entered.headers["location"]) == (303, "/?trace=0")
            assert "HttpOnly" in entered.headers["set-cookie"]
            assert "samesite=strict" in entered.headers["set-cookie"].lower()
            assert client.get("/api/state").status_code == 200


def test_a_port_in_use_is_one_sentence():
    with listening_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 cannot be used"):
            listening_socket("127.0.0.1", port)
    for host, port, words in (("no.such.invalid", 0, "--host"), ("127.0.0.1", 70000, "--port")):
        with pytest.raises(ConfigError, match=words):
            listening_socket(host, port)


MALFORMED = {  # what is sent, and the status
    "70,000 digits": (b"GET /report/" + b"9" * 70_000 + b" HTTP/1.1\r\n" + HEAD + b"\r\n", 414),
    "a body": (GET + b"Content-Length: 2\r\n\r\n{}", 413),
    "a chunked body": (GET + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 413),
    "a header of 100 kB": (GET + b"X: " + b"a" * 100_000 + b"\r\n\r\n", 431),
    "10,000 headers": (GET + b"X: a\r\n" * 10_000 + b"\r\n", 431),
    "two hosts": (GET + b"Host: evil.example\r\n\r\n", 421),
    "no host": (b"GET /api/state HTTP/1.1\r\n\r\n", 421),
    "a websocket": (GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 200),
    "another protocol": (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
}


def status_of(server, content):
    with connected(server) as raw:
        raw.sendall(content)
        return int(raw.recv(65536).split()[1])


def test_malformed_requests_are_answered_in_one_sentence(run, capfd):
    with served(run) as server:
        statuses = {name: status_of(server, content) for name, (content, _) in MALFORMED.items()}
        with connected(server) as raw:  # a client that leaves in the middle of a request
            raw.sendall(GET)
        assert status_of(server, GET + b"\r\n") == 200
    assert statuses == {name: status for name, (_, status) in MALFORMED.items()}
    assert capfd.readouterr().err == ""


def test_slow_clients_do_not_block_others(run, monkeypatch):
    monkeypatch.setattr(server_module.Handler, "timeout", 0.5)
    with (
        served(run) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client,
    ):
        idle = [connected(server) for _ in range(40)]
        for number, raw in enumerate(idle):
            raw.sendall((b"", b"GET / HT", GET)[number % 3])
        readers = [connected(server) for _ in range(30)]
        for raw in readers:  # request a large file, and read nothing of it
            raw.sendall(b"GET /static/plotly.js HTTP/1.1\r\n" + HEAD + b"\r\n")
        assert client.get("/api/state").status_code == 200
        for raw in idle:  # the server closes all of them
            while raw.recv(65536):
                pass
            raw.close()
        wait_for(lambda: server._free._value > server_module.MOST_CONNECTIONS - 5)
        for raw in readers:
            raw.close()
        assert ask(client, "overview")["totals"]["records"] == MOMENTS * LAYERS


def test_too_many_connections_are_closed(run, monkeypatch):
    monkeypatch.setattr(server_module, "MOST_CONNECTIONS", 2)
    with served(run) as server:
        first = [connected(server) for _ in range(2)]
        for raw in first:
            raw.sendall(GET + b"\r\n")
            assert raw.recv(65536)
        with connected(server) as third:
            assert third.recv(1) == b""
        for raw in first:
            raw.close()
        wait_for(lambda: server._free._value == 2)
        assert status_of(server, GET + b"\r\n") == 200
