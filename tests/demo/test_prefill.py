"""The prefill engine: in this process as a group of one, and its microbatches."""

import numpy as np
import pytest
import torch

import ultraep
from ultraep_tools.demo.model import ModelConfig, TinyMoE
from ultraep_tools.demo.prefill import (
    Engine,
    Lengths,
    Prompt,
    ServedTinyMoE,
    answer,
    make_prompts,
    next_microbatch,
    packed,
)
from ultraep_tools.demo.text import Text
from ultraep_tools.launch.group import process_group
from ultraep_tools.launch.processes import RankPlace

LENGTHS = Lengths(shortest=4, longest=16, burst=4)
pytestmark = pytest.mark.filterwarnings("ignore::ultraep.NothingToBalance")  # as one process


@pytest.fixture
def model(tmp_path):
    with process_group(RankPlace(0, 1, 0, str(tmp_path / "store"))) as group:
        balancer = ultraep.Balancer(group, experts=4, slots=1)
        config = ModelConfig(hidden=16, ffn=16, experts=4, layers=2, heads=2)
        yield TinyMoE(config, balancer).double().eval()
        balancer.close()


@torch.no_grad()
def test_packed_prompts_do_not_attend_to_each_other(model):
    texts = [torch.arange(3, 9), torch.arange(40, 60), torch.arange(7, 8)]
    tokens, positions, ends = packed(texts)
    together = model(tokens, positions)[0, ends]
    alone = torch.cat([model(text[None])[:, -1] for text in texts])
    torch.testing.assert_close(together, alone)
    served = ServedTinyMoE(model)
    assert served.first_tokens(texts) == alone.argmax(dim=-1).tolist()
    assert served.first_tokens([]) == []


def test_waiting_starts_at_the_arrival_in_real_time(model):
    prompts = make_prompts([0.0, 0.5], LENGTHS, [0], Text().training)
    turn = Engine(ServedTinyMoE(model), budget=64).serve(prompts, "none")
    assert turn.seconds >= 0.5
    assert turn.waited[0] > 0
    assert 0 < turn.waited[1] <= turn.seconds - 0.5  # not from the start of the turn
    assert turn.tokens == [len(prompt.ids) for prompt in prompts]
    assert (turn.before, turn.after) == (1, 1)


def test_all_policies_serve_the_same_first_tokens(model):
    prompts, reports = make_prompts([0.0] * 9, LENGTHS, [0], Text().training), []
    turns = answer(
        model,
        prompts,
        ["none", "ultraep"],
        budget=32,
        rounds=2,
        report=lambda *words: reports.append(words[:2]),
    )
    assert turns["none"].first == turns["ultraep"].first
    assert reports == [("none", 1), ("ultraep", 1), ("none", 2), ("ultraep", 2)]


def test_prompts_are_seeded_and_within_their_lengths():
    texts = Text().training
    first, second = (make_prompts([0.0] * 50, LENGTHS, [seed], texts) for seed in (3, 3))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(first, second, strict=True))
    lengths = np.array([len(prompt.ids) for prompt in first])
    assert lengths.min() >= 4
    assert 9 <= lengths.max() <= 16


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param([50, 10, 20, 30, 60, 5], [[0], [1, 2, 3]], id="in order, evenly"),
        pytest.param([50], [[0], []], id="one prompt"),
        pytest.param([500, 10, 60], [[0], [1]], id="over the budget, alone"),
    ],
)
def test_a_microbatch_takes_the_prompts_that_fit(tokens, expected):
    waiting = [Prompt(n, 0.0, torch.zeros(count)) for n, count in enumerate(tokens)]
    batch = next_microbatch(waiting, 2, 64)
    assert [[prompt.number for prompt in part] for part in batch] == expected
