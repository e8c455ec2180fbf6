"""The server: who may ask, what is served, and that nobody is kept waiting by others."""

import json
import shutil
import socket
import time

import numpy as np
import pytest

from view.runs import LAYERS, MOMENTS, served, wait_for, write_run

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

from ultraep import ConfigError  # noqa: E402
from ultraep.metrics.hosts import is_loopback  # noqa: E402
from ultraep.tools.view import guard, replays  # noqa: E402
from ultraep.tools.view import server as server_module  # noqa: E402
from ultraep.tools.view.catalogue import Catalogue  # noqa: E402
from ultraep.tools.view.server import bound_socket, open_server, reachable_name  # noqa: E402
from ultraep.tools.view.traces import OpenTrace  # noqa: E402


@pytest.fixture(scope="module")
def server(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(run, folder / "run")
    (folder / "report.html").write_text("<p>a report</p>")
    (folder / "secret.txt").write_text("secret")
    with served(folder) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as found:
        yield found


def port_of(server):
    return server.listener.getsockname()[1]


# -- answers -------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_trace(client, trace):
    state = client.get("/api/state").json()
    assert [item["kind"] for item in state["items"]] == ["trace", "report"]
    assert state["items"][0]["records"] == len(trace)
    whole = client.get("/api/overview", params={"trace": 0}).json()
    assert whole["totals"]["before"] == pytest.approx(trace.imbalance_before.mean(), abs=1e-6)
    assert whole["totals"]["bytes"] == trace.bytes_moved.sum()
    for layer in range(LAYERS):
        own = trace.of_layer(layer)
        mean = own.imbalance_after.mean()
        assert whole["layers"]["after"][layer] == pytest.approx(mean, abs=1e-6)
    key = dict(zip(("step", "layer", "microbatch"), whole["worst"], strict=True))
    record = client.get("/api/record", params={"trace": 0} | key).json()
    worst = int(trace.imbalance_before.argmax())
    assert record["loads"] == trace.loads[worst].sum(axis=0).tolist()
    assert record["rows"] == trace.slot_rows[worst].tolist()
    assert record["around"]["moments"] == MOMENTS
    stages = list(client.get("/api/stages", params={"trace": 0} | key).json().values())
    names = [name for one in stages for name in one["stages"]]
    seconds = np.concatenate([np.array(one["seconds"]) for one in stages], axis=1)
    own = trace.seconds[worst][:, [trace.header.stages.index(name) for name in names]]
    np.testing.assert_allclose(seconds, own, atol=1e-7)
    cell = client.get("/api/worst", params={"trace": 0, "from": 2, "to": 3, "layer": 1}).json()
    assert cell["key"] == [1, 1, 0]
    heat = client.get("/api/heat", params={"trace": 0, "value": "copies"}).json()
    assert np.sum(heat["z"]) == trace.num_copies.sum()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/api/overview?trace=9", "there is none of this number"),
        ("/api/overview?trace=1", "there is none of this number"),
        ("/api/overview?trace=x", "must be a whole number"),
        ("/api/overview?trace=0&points=1000000000", "must be a whole number in 2..2000"),
        ("/api/overview?trace=0&from=" + "9" * 30, "must be a whole number"),
        ("/api/heat?trace=0&value=__class__", "value must be one of"),
        ("/api/record?trace=0&step=999&layer=0&microbatch=0", "no such record"),
        ("/api/stages?trace=0&step=0&layer=77", "no such record"),
        ("/api/replays/5", "there is none of this number"),
        ("/report/0", "there is none of this number"),
    ],
)
def test_a_wrong_question_is_one_sentence(client, path, words):
    answer = client.get(path)
    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_a_stretch_beyond_the_run_is_empty(client):
    found = client.get("/api/overview", params={"trace": 0, "from": 500, "to": 600}).json()
    assert found["totals"]["records"] == 0


# -- replays -------------------------------------------------------------------------------------


def answer_of(client, question):
    job = client.post("/api/replays", json=question)
    assert job.status_code == 200, job.text
    number = job.json()["number"]
    ended = ("done", "failed", "stopped")
    wait_for(lambda: client.get(f"/api/replays/{number}").json()["state"] in ended, 120)
    return client.get(f"/api/replays/{number}").json()


def test_a_replay_as_recorded_is_the_recording(client, trace):
    job = answer_of(client, {"trace": 0, "policy": "ultraep"})
    assert (job["state"], job["done"], job["total"]) == ("done", len(trace), len(trace))
    assert (
        job["answer"]["recorded"]["lines"]["after"] == job["answer"]["replayed"]["lines"]["after"]
    )
    again = client.post("/api/replays", json={"trace": 0, "policy": "ultraep"}).json()
    assert again["number"] == job["number"]
    none = answer_of(client, {"trace": 0, "policy": "none", "ranks": 2, "slots": 2})["answer"]
    assert none["line"]["ranks"] == 2
    assert none["line"]["copies"] == 0
    assert none["replayed"]["lines"]["before"] == none["replayed"]["lines"]["after"]


def test_some_layers_are_planned_again_of_a_long_trace(client, monkeypatch):
    monkeypatch.setattr(replays, "MOST_PLANS", MOMENTS)
    monkeypatch.setattr(replays.planned_again, "__defaults__", (MOMENTS,))
    job = answer_of(client, {"trace": 0, "policy": "quota"})
    assert (len(job["answer"]["layers"]), job["answer"]["all_layers"]) == (1, LAYERS)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"trace": 0}, "a question has trace, policy"),
        ({"trace": 0, "policy": "magic"}, "unknown policy 'magic'"),
        ({"trace": 0, "policy": "none", "ranks": 3}, "4 recorded ranks cannot become 3"),
        ({"trace": 0, "policy": "eplb", "history": 0}, "history must be at least 1"),
        ({"trace": True, "policy": "none"}, "trace is 'True'"),
        ({"trace": 0, "policy": "none", "more": 1}, "a question has"),
        ([], "a question has"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(client, question, words):
    answer = client.post("/api/replays", json=question)
    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_a_replay_can_be_stopped(server, client, monkeypatch):
    routed = OpenTrace.routed

    def slowly(self, key):
        time.sleep(0.05)
        return routed(self, key)

    monkeypatch.setattr(OpenTrace, "routed", slowly)
    number = client.post("/api/replays", json={"trace": 0, "policy": "echo"}).json()["number"]
    wait_for(lambda: client.get(f"/api/replays/{number}").json()["done"] > 1)
    client.post(f"/api/replays/{number}/stop", json={})
    wait_for(lambda: client.get(f"/api/replays/{number}").json()["state"] == "stopped")
    job = client.get(f"/api/replays/{number}").json()
    assert 1 < job["done"] < job["total"]
    assert job["answer"]["replayed"]["totals"]["records"] == job["done"]


# -- who may ask ---------------------------------------------------------------------------------


REFUSED = {
    "name of another": ({"host": "evil.example"}, 421),
    "its port": ({"host": "evil.example:80"}, 421),
    "no sense": ({"host": "127.0.0.1@evil"}, 421),
    "another machine": ({"host": "192.168.1.2"}, 421),
    "origin": ({"origin": "http://evil.example"}, 403),
    "no origin": ({"origin": "null"}, 403),
    "another port": ({"origin": "http://127.0.0.1:1"}, 403),
    "cross-site": ({"sec-fetch-site": "cross-site"}, 403),
    "same site": ({"sec-fetch-site": "same-site"}, 403),
}


@pytest.mark.parametrize("path", ["/", "/api/state", "/static/plotly.js", "/report/1"])
@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused(client, name, path):
    headers, status = REFUSED[name]
    answer = client.get(path, headers=headers)
    assert answer.status_code == status
    assert "content-security-policy" in answer.headers


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST:99"])
def test_names_of_this_machine_are_fine(client, host):
    assert client.get("/api/state", headers={"host": host}).status_code == 200


def test_two_names_or_none_are_refused(server):
    for lines in (b"", b"Host: localhost\r\nHost: evil.example\r\n"):
        with socket.create_connection(("127.0.0.1", port_of(server)), 10) as raw:
            raw.sendall(b"GET /api/state HTTP/1.1\r\n" + lines + b"\r\n")
            status = raw.recv(1000).split()[1]
            assert status in (b"400", b"421")


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_other_methods_are_refused(client, method):
    assert client.request(method, "/api/state").status_code == 405


def test_what_is_posted_is_bounded(client):
    ask = "/api/replays"
    assert client.post(ask, content=b"{}").status_code == 415
    plain = {"content-type": "text/plain"}
    assert client.post(ask, content=b"{}", headers=plain).status_code == 415
    kind = {"content-type": "application/json"}
    large = b" " * (guard.MOST_BODY + 1)
    assert client.post(ask, content=large, headers=kind).status_code == 413
    assert client.post(ask, content=iter([b"{}"]), headers=kind).status_code == 411
    assert client.post(ask, content=b"[" * 10000, headers=kind).status_code == 400
    assert client.get("/api/state?" + "x" * 3000).status_code == 414
    assert client.get("/" + "x" * 3000).status_code == 414


def test_headers_are_strict(client):
    for path in ("/", "/static/view.js", "/api/state", "/nothing"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "server" not in headers
    policy = client.get("/report/1").headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts;")
    assert "allow-same-origin" not in policy


@pytest.mark.parametrize(
    "path",
    [
        *("/static/../api.py", "/static/%2e%2e/api.py", "/static/..%2f..%2fapi.py", "/secret.txt"),
        *("/static//etc/passwd", "/static/%2fetc%2fpasswd", "/report/../secret.txt"),
        *("/report/%2e%2e%2fsecret.txt", "/report/1%2f..%2fsecret.txt", "/static/x%00.js"),
        *("/run/header.json", "/api/../secret.txt", "//secret.txt", "/static/", "/report/"),
    ],
)
def test_nothing_else_is_served(server, path):
    """Sent as it stands: clients tidy up such addresses by themselves."""
    with socket.create_connection(("127.0.0.1", port_of(server)), 10) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while more := raw.recv(65536):
            answer += more
    assert answer.split()[1] in (b"404", b"400", b"307")
    assert b"secret" not in answer.partition(b"\r\n\r\n")[2]
    assert b"ultraep-trace" not in answer


def test_a_file_that_is_known_is_not_sent_again(client):
    first = client.get("/static/parts.js")
    again = client.get("/static/parts.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


# -- a token -------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_loopback_needs_no_token(host):
    assert is_loopback(host)


def test_the_printed_address_can_be_opened():
    assert reachable_name("192.168.1.2") == "192.168.1.2"
    assert reachable_name("gpu-3.example") == "gpu-3.example"
    for host in ("0.0.0.0", "::", "0:0::0"):
        assert reachable_name(host) not in ("0.0.0.0", "::", host)


def test_beyond_this_machine_a_token_is_needed(run):
    with served(run, host="0.0.0.0") as server:
        address, _, token = server.url.partition("?token=")
        assert len(token) >= 32
        assert "0.0.0.0" not in address, "nobody can open that"
        base = f"http://127.0.0.1:{port_of(server)}/"
        with httpx.Client(base_url=base, trust_env=False, timeout=30) as client:
            for path in ("/", "/api/state", "/static/view.js", "/?token=x", f"/?token={token}x"):
                assert client.get(path).status_code == 401
            wrong = {"cookie": f"{guard.COOKIE}=wrong; {guard.COOKIE}=%"}
            assert client.get("/api/state", headers=wrong).status_code == 401
            assert client.get("/", headers={"host": "evil.example"}).status_code == 421
            found = client.get(f"/?trace=0&token={token}")
            assert (found.status_code, found.headers["location"]) == (303, "/?trace=0")
            assert "HttpOnly" in found.headers["set-cookie"]
            assert "samesite=strict" in found.headers["set-cookie"].lower()
            assert client.get("/api/state").status_code == 200


# -- those who are slow, or leave ----------------------------------------------------------------


def test_slow_clients_do_not_block_others(run, monkeypatch):
    monkeypatch.setattr(server_module, "HEADER_SECONDS", 0.5)
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.5)
    with (
        served(run) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client,
    ):
        idle = [socket.create_connection(("127.0.0.1", port_of(server)), 10) for _ in range(40)]
        for number, raw in enumerate(idle):
            head = b"POST /api/replays HTTP/1.1\r\nHost: localhost\r\n"
            kind = b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
            raw.sendall((b"", b"GET / HT", head, head + kind)[number % 4])
        readers = [socket.create_connection(("127.0.0.1", port_of(server)), 10) for _ in range(8)]
        for raw in readers:  # ask for a large file, and read nothing of it
            raw.sendall(b"GET /static/plotly.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.get("/api/state").status_code == 200
        for raw in idle:  # all of them are sent away
            raw.settimeout(20)
            while raw.recv(65536):
                pass
            raw.close()
        for raw in readers:  # some leave in the middle of it
            raw.close()
        assert client.get("/api/overview", params={"trace": 0}).status_code == 200


def test_an_answer_that_takes_too_long_is_given_up(run, monkeypatch):
    monkeypatch.setattr(guard, "ANSWER_SECONDS", 0.2)
    with served(run) as server:
        monkeypatch.setattr(server.catalogue, "trace", lambda *_: time.sleep(0.6))
        query = {"trace": 0, "step": 0, "layer": 0, "microbatch": 0}
        answer = httpx.get(f"{server.url}api/record", params=query, trust_env=False)
        assert answer.status_code == 503


def test_a_port_in_use_is_one_sentence(run):
    with bound_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 cannot be used"):
            open_server(Catalogue([run]), port=port)
    for host, port, words in (
        ("no.such.host.invalid", 0, "--host"),
        ("127.0.0.1", 70000, "--port"),
    ):
        with pytest.raises(ConfigError, match=words):
            bound_socket(host, port)


# -- live ----------------------------------------------------------------------------------------


def test_a_running_job_is_followed(tmp_path, monkeypatch):
    from ultraep.tools.view import catalogue as catalogue_module

    monkeypatch.setattr(catalogue_module, "PERIOD", 0.05)
    with served(tmp_path / "run", live=True, finished=False) as server:
        ask = f"{server.url}api/state"
        assert httpx.get(ask, trust_env=False).json()["items"] == []
        write_run(tmp_path / "run", moments=3)

        def records():
            items = httpx.get(ask, trust_env=False).json()["items"]
            return items[0]["records"] if items else 0

        wait_for(lambda: records() == 3 * LAYERS)
        shutil.rmtree(tmp_path / "run")
        wait_for(lambda: httpx.get(ask, trust_env=False).json()["items"][0]["gone"])
        assert records() == 3 * LAYERS
        query = {"trace": 0, "step": 0, "layer": 0, "microbatch": 0}
        answer = httpx.get(f"{server.url}api/record", params=query, trust_env=False)
        assert answer.status_code == 400
        assert "no such file" in json.loads(answer.text)["error"]
