"""Real servers on this machine: those that answer, and those that do not."""

import socket
import time

import pytest

from serving.servers import serving
from ultraep.errors import CommunicationError, ConfigError
from ultraep.tools.serving import endpoint
from ultraep.tools.serving.endpoint import EndpointOptions, endpoint_of, run
from ultraep.tools.serving.load import Arrival, Lengths, LoadOptions
from ultraep.tools.serving.measure import UnderLoad

LENGTHS = Lengths(shortest=4, longest=16, burst=4)


def load(rate=40.0, seconds=0.3, **more):
    return LoadOptions(rates=(rate,), seconds=seconds, rounds=1, lengths=LENGTHS, **more)


def measured(*servers, timeout=5.0, asked=None, model=None):
    """The turns of these servers, told by numbers as names."""
    found = []
    endpoints = [endpoint_of(f"{n}={server.url}", model) for n, server in enumerate(servers)]
    test = EndpointOptions(load=asked or load(), endpoints=tuple(endpoints), timeout=timeout)
    run(test, found.append)
    return found


def test_the_first_token_of_every_prompt_is_timed():
    with serving(delay=0.1) as server:
        (turn,) = measured(server)
    assert not turn.errors
    assert len(turn.waited) == len(server.asked) > 3
    assert min(turn.waited) >= 0.1
    assert min(turn.waited) < 0.2  # the end of the stream comes no sooner
    body = server.asked[0]
    assert (body["model"], body["max_tokens"], body["stream"]) == ("tiny", 1, True)
    assert max(len(asked["prompt"]) for asked in server.asked) <= 16 * endpoint.BYTES_PER_TOKEN


def test_nobody_waits_for_those_before():
    recorded = tuple(Arrival(0.05 * number) for number in range(8))
    with serving(delay=0.3) as server:
        (turn,) = measured(server, asked=LoadOptions(recorded=recorded, rounds=1, lengths=LENGTHS))
    assert turn.rate == pytest.approx(20.0)
    assert turn.seconds < 8 * 0.3
    assert len(turn.waited) == 8
    assert None not in turn.waited


def test_servers_take_turns_under_the_same_prompts():
    with serving() as one, serving() as two:
        turns = measured(one, two, asked=load(rate=30.0))
    assert [turn.variant for turn in turns] == ["0", "1"]
    assert sorted(a["prompt"] for a in one.asked) == sorted(a["prompt"] for a in two.asked)


def test_imbalance_is_what_the_server_counted_meanwhile():
    with serving(counters=True) as tells, serving() as silent:
        one, two = measured(tells, silent)
    assert (one.before, one.after) == (pytest.approx(1.5), pytest.approx(1.0))
    assert (two.before, two.after) == (None, None)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("error", "status 500"),
        ("too long", "status 400"),
        ("nonsense", "nonsense"),
        ("no token", "nonsense"),
        ("break off", "broke off"),
    ],
)
def test_wrong_answers_are_counted_by_kind(how, kind):
    with serving(how) as server:
        (turn,) = measured(server)
    assert turn.errors == {kind: len(turn.waited)}
    assert set(turn.waited) == {None}
    assert UnderLoad("0", turn.rate, (turn,)).percentile(50) is None


def test_a_server_that_hangs_is_not_waited_for():
    begin = time.monotonic()
    with serving("hang") as server, pytest.raises(CommunicationError, match="given up after 8"):
        measured(server, timeout=0.3)
    assert time.monotonic() - begin < 10.0


def test_a_server_that_dies_in_the_middle_is_told(monkeypatch):
    found = []
    with serving() as alive, serving() as dies:
        names = tuple(endpoint_of(f"{n}={s.url}") for n, s in enumerate((dies, alive)))
        asked = EndpointOptions(load=load(rate=60.0, seconds=0.4), endpoints=names)
        known = endpoint._model_of

        async def then_dies(client, one):
            told = await known(client, one)
            if one.url == dies.url:
                dies.how = "break off"  # on connections that are open
                dies.shutdown()
                dies.server_close()
            return told

        monkeypatch.setattr(endpoint, "_model_of", then_dies)
        with pytest.raises(CommunicationError, match=f"{dies.url}: given up"):
            run(asked, found.append)
    by_name = {turn.variant: turn for turn in found}
    assert by_name["0"].waited.count(None) == len(by_name["0"].waited)
    assert by_name["0"].errors[endpoint.UNSENT] > 0
    assert not by_name["1"].errors


@pytest.mark.parametrize("how", ["no models", "nobody"])
def test_no_server_is_an_error_before_any_prompt(how):
    with serving(how) as server:
        url = server.url
        if how == "nobody":
            with socket.create_server(("127.0.0.1", 0)) as free:
                url = f"http://127.0.0.1:{free.getsockname()[1]}"
        asked = EndpointOptions(load=load(), endpoints=(endpoint_of(url),))
        with pytest.raises(CommunicationError, match=f"{url}/v1/models: "):
            run(asked, lambda _: None)


def test_a_server_without_the_model_is_refused():
    with serving() as server, pytest.raises(ConfigError, match="serves tiny, not 'large'"):
        measured(server, model="large")


def test_what_is_no_endpoint_is_refused():
    for text in ("127.0.0.1:8000", "ftp://here", "a=b"):
        with pytest.raises(ConfigError, match=r"\[NAME=\]http://HOST:PORT"):
            endpoint_of(text)
    twice = (endpoint_of("http://a:1"), endpoint_of("http://a:1/v1"))
    with pytest.raises(ConfigError, match="names that differ"):
        EndpointOptions(load=load(), endpoints=twice)
    with pytest.raises(ConfigError, match="not calibrated"):
        EndpointOptions(load=LoadOptions(), endpoints=twice[:1])
    with pytest.raises(ConfigError, match="--timeout"):
        EndpointOptions(load=load(), endpoints=twice[:1], timeout=0.0)
