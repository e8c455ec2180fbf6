"""The verbs of a microbatch: their order, their inputs, and their lifetime."""

import weakref

import pytest
import torch
from dense import Example

from ultraep import Balancer, ConfigError
from ultraep.layer import run_stages
from ultraep.microbatch import Layer

IDS = torch.tensor([[0, 1], [2, 3]])
BEFORE = {"plan": "count", "replicate": "plan", "reroute": "plan", "dispatch": "reroute"}


def begun():
    return Balancer("alone", experts=4).begin(Layer(0, {"w": torch.zeros(4, 2)}), IDS)


@pytest.mark.parametrize("verb", BEFORE)
def test_a_verb_that_is_called_too_early_names_the_missing_verb(verb):
    with pytest.raises(ConfigError, match=rf"call {BEFORE[verb]}\(\) first"):
        getattr(begun(), verb)()


def test_dispatch_needs_tokens_and_gates():
    microbatch = begun()
    assert microbatch.count().tolist() == [[1, 1, 1, 1]]
    microbatch.plan()
    assert microbatch.reroute().slots.tolist() == IDS.tolist()  # enough for other dispatchers
    with pytest.raises(ConfigError, match=r"pass both to Balancer\.begin"):
        microbatch.dispatch()


def test_all_stages_need_stage_6():
    gates, tokens = torch.ones(2, 2), torch.zeros(2, 3)
    with pytest.raises(ConfigError, match="layer 7 has no `serve`"):
        run_stages(Balancer("alone", experts=4), Layer(7), IDS, gates, tokens)


def test_backward_keeps_no_inputs():
    """Only replicas and rows stay alive until backward."""
    example = Example([20])
    balancer = Balancer("alone", experts=8)
    experts = example.layer(balancer).experts
    ids = torch.arange(40).reshape(20, 2) % 8
    gates = torch.ones(20, 2, dtype=torch.float64)
    kept = [weakref.ref(ids), weakref.ref(gates)]
    y, _ = run_stages(balancer, Layer(0, experts.bundle, experts), ids, gates, example.inputs[0])
    del ids, gates
    assert y.requires_grad
    assert [ref() for ref in kept] == [None, None]
