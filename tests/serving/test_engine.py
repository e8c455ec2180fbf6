"""The engine: in this process as a group of one, and as two ranks."""

import os
import signal

import pytest
import torch
from demo.runs import alive

pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)

from serving.models import save_tiny
from ultraep.errors import CommunicationError, ConfigError, FileError
from ultraep.tools.launch import processes
from ultraep.tools.launch.group import process_group
from ultraep.tools.serving import run as runs
from ultraep.tools.serving.engine import Engine
from ultraep.tools.serving.load import Arrival, Lengths, LoadOptions, make_prompts
from ultraep.tools.serving.measure import Turn, agreement
from ultraep.tools.serving.model import TransformersModel, facts_of
from ultraep.tools.serving.run import (
    Calibrated,
    EngineOptions,
    calibrate,
    check,
    rates_of,
    run,
)

LENGTHS = Lengths(shortest=4, longest=16, burst=4)
LOAD = LoadOptions(rates=(20.0, 40.0), seconds=0.4, rounds=1, lengths=LENGTHS)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(tiny):
    """One rank, which is this process."""
    with process_group() as group:
        model = TransformersModel(tiny, group, 0, slots=1, policy="none")
        yield Engine(model)
        for balancer in model.balancers:
            balancer.close()


def test_facts_are_known_before_the_model_is_made(tiny):
    facts = facts_of(tiny)
    assert (facts.layers, facts.experts, facts.top_k, facts.longest) == (2, 4, 2, 64)
    random = facts_of(None)
    assert random.name == "random Qwen3-MoE"
    assert random.layers * random.experts * 3 * 512 * 1536 > 0.95 * random.parameters


def test_what_cannot_be_served_is_refused_before_any_process(tiny, tmp_path):
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no experts"):
        check(EngineOptions(load=LOAD, model=save_tiny(tmp_path / "dense", experts=False)))
    with pytest.raises(FileError, match=r"no config\.json"):
        check(EngineOptions(load=LOAD, model=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"up to 256 tokens, but .* takes 64"):
        check(EngineOptions(load=LoadOptions(), model=tiny))
    recorded = (Arrival(0.0, 12), Arrival(1.0, 65))
    with pytest.raises(ConfigError, match="up to 65 tokens"):
        check(EngineOptions(load=LoadOptions(recorded=recorded, lengths=LENGTHS), model=tiny))
    with pytest.raises(ConfigError, match=r"--ranks 5, but .* 4 experts"):
        check(EngineOptions(load=LOAD, model=tiny, ranks=5))


def test_prompts_of_one_sequence_do_not_see_each_other(engine):
    texts = [torch.arange(3, 9), torch.arange(40, 60), torch.arange(7, 8)]
    together = engine.model.last_logits(texts)
    alone = torch.cat([engine.model.last_logits([text]) for text in texts])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert engine.model.first_outputs(texts) == alone.argmax(dim=-1).tolist()
    assert engine.model.first_outputs([]) == []


def test_waiting_is_from_the_arrival_and_in_real_time(engine):
    arrivals = [Arrival(0.0), Arrival(0.5)]
    turn = engine.serve(make_prompts(arrivals, LENGTHS, [0], 8), "none", 2.0, 0)
    assert turn.microbatches == 2
    assert turn.seconds >= 0.5
    assert all(0 < waited < 0.45 for waited in turn.waited)
    assert None not in turn.first


def test_a_turn_that_takes_too_long_is_ended(engine, monkeypatch):
    monkeypatch.setattr(engine, "grace", 0.0)
    monkeypatch.setattr(engine, "budget", 1)
    turn = engine.serve(make_prompts([Arrival(0.0)] * 4, LENGTHS, [0], 8), "none", 9.0, 0)
    assert turn.errors == {"not served in time": turn.waited.count(None)}
    assert turn.waited.count(None) == 4


def test_calibration_sets_the_engine_up(engine, tiny, monkeypatch):
    monkeypatch.setattr(runs, "WANTED", 0.02)
    asked = EngineOptions(load=LoadOptions(lengths=LENGTHS), model=tiny)
    found = calibrate(engine, asked, 8)
    assert engine.budget == found.budget >= 32
    assert found.tokens_per_second > 0 < found.row_seconds
    assert found.copy_seconds == 0.0  # one rank has nothing to copy
    assert len(found.rates) == 4
    rates = rates_of(asked.load, 1000 * found.tokens_per_second)
    assert rates[3] / rates[0] == pytest.approx(1.4 / 0.4, rel=0.1)


def test_variants_take_turns_at_being_first():
    order = list(LoadOptions(rounds=2).turns(("a", "b"), (1.0, 2.0)))
    assert [variant for variant, *_ in order] == list("abba" + "baab")
    assert len(set(order)) == 8


@pytest.mark.slow
def test_two_ranks_serve_the_same_first_tokens_under_every_policy(tiny):
    heard = []
    asked = EngineOptions(load=LOAD, model=tiny, budget=48)
    run(asked, heard.append)
    found, *measured = heard
    assert isinstance(found, Calibrated)
    assert found.rates == (20.0, 40.0)
    assert found.copy_seconds > 0
    assert [type(turn) for turn in measured] == [Turn] * 8
    for turn in measured:
        assert None not in turn.waited
        assert not turn.errors
        assert turn.before >= turn.after - 1e-9 or turn.variant == "eplb"
    assert agreement(measured, "ultraep") == agreement(measured, "eplb") == 1.0
    even = [turn for turn in measured if turn.variant == "even"]
    assert max(turn.before for turn in even) < min(t.before for t in measured if t not in even)
    assert any(turn.copies for turn in measured if turn.variant == "eplb")


@pytest.mark.slow
def test_even_routing_is_left_alone(tiny):
    load = LoadOptions(rates=(40.0,), seconds=0.4, rounds=1, lengths=LENGTHS)
    asked = EngineOptions(
        load=load, model=tiny, budget=48, routing="even", variants=("none", "ultraep")
    )
    heard = []
    run(asked, heard.append)
    found, *measured = heard
    assert found.min_tokens > 1
    assert [turn.copies for turn in measured] == [0, 0]


@pytest.mark.slow
def test_a_rank_that_dies_is_named_and_the_others_stop(tiny, monkeypatch):
    started = []

    class Watched(processes.Rank):
        def __init__(self, *args):
            super().__init__(*args)
            started.append(self.process)

    monkeypatch.setattr(processes, "Rank", Watched)
    asked = EngineOptions(load=LoadOptions(lengths=LENGTHS, seconds=60.0), model=tiny, budget=48)
    with pytest.raises(CommunicationError, match=r"rank 1 failed.*ended by SIGKILL"):
        run(asked, lambda _: os.kill(started[1].pid, signal.SIGKILL))
    assert len(started) == 2
    assert alive([process.pid for process in started]) == []
