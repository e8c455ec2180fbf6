"""The engine: in this process as a group of one, and as two ranks."""

import os
import signal

import pytest
import torch
from demo.runs import alive

pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)

from serving.models import save_tiny
from ultraep.errors import CommunicationError, ConfigError, FileError
from ultraep_tools.launch import processes
from ultraep_tools.launch.group import process_group
from ultraep_tools.serving.engine import CPU, Engine
from ultraep_tools.serving.load import Arrival, Lengths, LoadOptions, make_prompts
from ultraep_tools.serving.measure import Turn, agreement
from ultraep_tools.serving.run import Calibrated, EngineOptions, check, load_model, run

LENGTHS = Lengths(shortest=4, longest=16, burst=4)
LOAD = LoadOptions(rates=(20.0, 40.0), seconds=0.4, rounds=1, lengths=LENGTHS)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(tiny):
    """An engine of one rank, which is this process."""
    with process_group() as group:
        model = load_model(EngineOptions(load=LOAD, model=tiny, slots=1), group, CPU)
        yield Engine(model)
        model.close()


def test_invalid_models_and_loads_are_refused_before_any_process_starts(tiny, tmp_path):
    recorded = LoadOptions(recorded=(Arrival(0.0, 12), Arrival(1.0, 65)), lengths=LENGTHS)
    dense = save_tiny(tmp_path / "dense", experts=False)
    for options, error, message in (
        ({"load": LOAD, "model": dense}, ConfigError, "Qwen3ForCausalLM has no experts"),
        ({"load": LOAD, "model": str(tmp_path)}, FileError, r"no config\.json"),
        ({"load": LoadOptions(), "model": tiny}, ConfigError, r"up to 256 tokens, but .* takes 64"),
        ({"load": recorded, "model": tiny}, ConfigError, "up to 65 tokens"),
        ({"load": LOAD, "model": tiny, "ranks": 5}, ConfigError, r"--ranks 5, but .* 4 experts"),
    ):
        with pytest.raises(error, match=message):
            check(EngineOptions(**options))


def test_packed_prompts_do_not_attend_to_each_other(engine):
    texts = [torch.arange(3, 9), torch.arange(40, 60), torch.arange(7, 8)]
    together = engine.model.last_logits(texts)
    alone = torch.cat([engine.model.last_logits([text]) for text in texts])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert engine.model.first_outputs(texts) == alone.argmax(dim=-1).tolist()
    assert engine.model.first_outputs([]) == []


def test_waiting_starts_at_the_arrival_in_real_time(engine):
    arrivals = [Arrival(0.0), Arrival(0.5)]
    turn = engine.serve(make_prompts(arrivals, LENGTHS, [0], 8), "none", 2.0, 0)
    assert turn.microbatches == 2
    assert turn.seconds >= 0.5
    assert turn.waited[0] > 0
    assert 0 < turn.waited[1] <= turn.seconds - 0.5  # not from the start of the turn
    assert None not in turn.first


@pytest.mark.slow
def test_two_ranks_serve_the_same_first_tokens_under_every_policy(tiny):
    events = []
    run(EngineOptions(load=LOAD, model=tiny, budget=48), events.append)
    calibrated, *turns = events
    assert isinstance(calibrated, Calibrated)
    assert calibrated.rates == (20.0, 40.0)
    assert [type(turn) for turn in turns] == [Turn] * 6
    for turn in turns:
        assert None not in turn.waited
        assert not turn.errors
        assert turn.before >= turn.after - 1e-9
    assert agreement(turns, "ultraep") == 1.0
    even = [turn for turn in turns if turn.variant == "even"]
    assert max(turn.before for turn in even) < min(t.before for t in turns if t not in even)
    assert any(turn.copies for turn in turns if turn.variant == "ultraep")


@pytest.mark.slow
def test_a_rank_that_dies_is_named_and_the_others_stop(tiny, monkeypatch):
    started = []

    class Watched(processes.Rank):
        def __init__(self, *args):
            super().__init__(*args)
            started.append(self.process)

    monkeypatch.setattr(processes, "Rank", Watched)
    options = EngineOptions(load=LoadOptions(lengths=LENGTHS, seconds=60.0), model=tiny, budget=48)
    with pytest.raises(CommunicationError, match=r"rank 1 failed.*ended by SIGKILL"):
        run(options, lambda _: os.kill(started[1].pid, signal.SIGKILL))
    assert len(started) == 2
    assert alive([process.pid for process in started]) == []
