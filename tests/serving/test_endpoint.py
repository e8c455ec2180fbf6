"""Servers on this machine, those that answer and those that do not; arrivals and options."""

import math
import socket

import pytest

from serving.servers import serving
from ultraep.errors import CommunicationError, ConfigError, FileError
from ultraep_tools.serving import endpoint
from ultraep_tools.serving.endpoint import EndpointOptions, endpoint_of, run
from ultraep_tools.serving.load import (
    Arrival,
    Lengths,
    LoadOptions,
    Prompt,
    next_microbatch,
    rate_of,
    read_arrivals,
)
from ultraep_tools.serving.run import EngineOptions

LENGTHS = Lengths(shortest=4, longest=16, burst=4)
LOAD = LoadOptions(rates=(40.0,), seconds=0.3, rounds=1, lengths=LENGTHS)


def measure(*servers, load=LOAD, model=None, timeout=5.0, turns=None):
    """The turns of these servers; their names are numbers."""
    turns = [] if turns is None else turns
    endpoints = [endpoint_of(f"{n}={server.url}", model) for n, server in enumerate(servers)]
    run(EndpointOptions(load=load, endpoints=tuple(endpoints), timeout=timeout), turns.append)
    return turns


def test_the_first_token_of_every_prompt_is_timed():
    with serving(delay=0.1) as server:
        (turn,) = measure(server)
    assert not turn.errors
    assert len(turn.waited) == len(server.bodies) > 3
    assert 0.1 <= min(turn.waited) < 0.2  # the stream ends later
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"], body["stream"]) == ("tiny", 1, True)
    assert max(len(body["prompt"]) for body in server.bodies) <= 16 * endpoint.BYTES_PER_TOKEN


def test_servers_get_the_same_prompts_and_imbalance_comes_from_their_counters():
    with serving(counters=True) as first, serving() as second:
        one, two = measure(first, second)
    assert [one.variant, two.variant] == ["0", "1"]
    prompts = [sorted(body["prompt"] for body in server.bodies) for server in (first, second)]
    assert prompts[0] == prompts[1]
    assert (one.before, one.after) == (pytest.approx(1.5), pytest.approx(1.0))
    assert (two.before, two.after) == (None, None)


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("error", "status 500"),
        ("too long", "status 400"),
        ("invalid", "invalid answer"),
        ("no token", "invalid answer"),
        ("break", "broken stream"),
    ],
)
def test_errors_are_counted_by_name(mode, error):
    with serving(mode) as server:
        (turn,) = measure(server)
    assert turn.errors == {error: len(turn.waited)}
    assert set(turn.waited) == {None}


def test_a_server_that_dies_is_dropped_and_the_others_continue(monkeypatch):
    turns, model_of = [], endpoint._model_of
    with serving() as dies, serving() as stays:

        async def model_then_death(client, server):
            model = await model_of(client, server)
            if server.url == dies.url:
                dies.mode = "break"  # for open connections
                dies.shutdown()
                dies.server_close()
            return model

        monkeypatch.setattr(endpoint, "_model_of", model_then_death)
        load = LoadOptions(rates=(60.0,), seconds=0.4, rounds=1, lengths=LENGTHS)
        with pytest.raises(CommunicationError, match=f"{dies.url}: dropped"):
            measure(dies, stays, load=load, turns=turns)
    dead, alive = sorted(turns, key=lambda turn: turn.variant)
    assert set(dead.waited) == {None}
    assert dead.errors[endpoint.UNSENT] > 0
    assert not alive.errors


def test_a_missing_server_or_model_is_an_error_before_any_prompt():
    with serving("no models") as server, pytest.raises(CommunicationError, match="/v1/models: "):
        measure(server)
    with socket.create_server(("127.0.0.1", 0)) as free:
        server.url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(CommunicationError, match=f"{server.url}/v1/models: "):
        measure(server)
    with serving() as server, pytest.raises(ConfigError, match="serves tiny, not 'large'"):
        measure(server, model="large")


def test_invalid_options_are_refused():
    for text in ("127.0.0.1:8000", "ftp://here", "a=b"):
        with pytest.raises(ConfigError, match=r"\[NAME=\]http://HOST:PORT"):
            endpoint_of(text)
    twice = (endpoint_of("http://a:1"), endpoint_of("http://a:1/v1"))
    for options, message in (
        ({"load": LOAD, "endpoints": twice}, "different names"),
        ({"load": LoadOptions(), "endpoints": twice[:1]}, "not calibrated"),
        ({"load": LOAD, "endpoints": twice[:1], "timeout": 0.0}, "--timeout"),
    ):
        with pytest.raises(ConfigError, match=message):
            EndpointOptions(**options)


LONGER = Lengths(shortest=8, longest=64, burst=10)


def test_an_arrivals_file_is_sorted_by_time_and_scaled_to_the_rate(tmp_path):
    path = tmp_path / "arrivals.csv"
    path.write_text("# second, tokens\n12.5, 40\n10\n\n11.5,7\n")
    recorded = read_arrivals(path)
    assert recorded == (Arrival(0.0), Arrival(1.5, 7), Arrival(2.5, 40))
    load = LoadOptions(recorded=recorded, rates=(4.0,), lengths=LONGER)
    prompts = load.prompts(4.0, 0, bytes_per_token=3)
    assert [prompt.tokens for prompt in prompts[1:]] == [7, 40]
    assert rate_of([Arrival(prompt.arrival) for prompt in prompts]) == pytest.approx(4.0)
    assert LoadOptions(recorded=recorded).known_rates() == (pytest.approx(0.8),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\nsoon\n", r"line 2: expected seconds\[,tokens\], got 'soon'"),
        ("1, many\n", "line 1"),
        ("1, 0\n", "line 1"),
        ("nan\n", "line 1"),
        ("# nothing\n", "between 1 and 100,000 arrivals are needed, got 0"),
    ],
)
def test_invalid_arrivals_files_are_refused(tmp_path, text, message):
    path = tmp_path / "arrivals"
    path.write_text(text)
    with pytest.raises(FileError, match=message):
        read_arrivals(path)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param([50, 10, 20, 30, 60, 5], [[0], [1, 2, 3]], id="in order, evenly"),
        pytest.param([50], [[0], []], id="one prompt"),
        pytest.param([500, 10, 60], [[0], [1]], id="over the budget, alone"),
    ],
)
def test_a_microbatch_takes_the_prompts_that_fit(tokens, expected):
    waiting = [Prompt(n, 0.0, "code", count, b"x" * count) for n, count in enumerate(tokens)]
    batch = next_microbatch(waiting, 2, 64)
    assert [[prompt.number for prompt in part] for part in batch] == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoadOptions(rates=(0.0,)), "--rate must be positive numbers, got 0"),
        (lambda: LoadOptions(rates=(math.inf,)), "--rate must be positive numbers, got inf"),
        (lambda: LoadOptions(shares=(-1.0,)), "--load must be positive"),
        (lambda: LoadOptions(seconds=0.0), "--seconds must lie in 0 to 3600, got 0"),
        (lambda: LoadOptions(objective=math.nan), "--slo must lie in 0 to 3600, got nan"),
        (lambda: LoadOptions(rounds=0), "--rounds must be at least 1, got 0"),
        (lambda: LoadOptions(seed=-1), "--seed"),
        (lambda: Lengths(shortest=9, longest=8), "got 9 and 8"),
        (lambda: Lengths(burst=0), "--burst must be at least 1"),
        (lambda: EngineOptions(load=LoadOptions(), ranks=0), "between 1 and 64, got 0"),
        (lambda: EngineOptions(load=LoadOptions(), slots=-1), "not be negative, got -1"),
        (lambda: EngineOptions(load=LoadOptions(), budget=0), "--budget must be at least 1, got 0"),
        (lambda: EngineOptions(load=LoadOptions(), routing="odd"), "one of own, even, got 'odd'"),
    ],
)
def test_invalid_loads_and_engines_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
