"""A balanced layer through the dispatchers of other libraries equals the layer of the data plane.

The compiled parts of the libraries are strict stand-ins (stand_ins.py).
"""

from dataclasses import replace

import pytest
import torch
from dense import (
    Example,
    assert_close,
    assert_same_tensors,
    gradients_of,
    on_every_rank,
    with_network,
)
from stand_ins import Buffer, ElasticBuffer, HybridEPBuffer, TokenSwitchNCCL, library
from torch.utils.checkpoint import checkpoint

from ultraep.dispatchers.deepep import DeepEP, DeepEPBuffer
from ultraep.dispatchers.hybridep import HybridEP
from ultraep.dispatchers.token_switch import TokenSwitch
from ultraep.topology import even_homes

pytestmark = pytest.mark.usefixtures("one_thread", "libraries")

EXAMPLE = Example([30, 20, 0, 25], experts=8, bias=True)
NAMES = ("DeepEP", "DeepEPBuffer", "HybridEP", "TokenSwitch")
ROWS = 400  # more than arrive at a rank


@pytest.fixture
def libraries(monkeypatch):
    """Pretend that the libraries are installed."""
    library(monkeypatch, "deep_ep", "2.1.0")
    library(monkeypatch, "torch_stand_in", "2.15.0")


def dispatcher_of(name, *, wide=True, slots_per_rank=4, row_bytes=16 * 8):
    """Return a function that makes the dispatcher of a rank."""

    def make(comm):
        if name == "DeepEP":
            dispatcher = DeepEP(ElasticBuffer(comm, wide=wide))
        elif name == "DeepEPBuffer":
            dispatcher = DeepEPBuffer(Buffer(comm, wide=wide))
        elif name == "HybridEP":
            dispatcher = HybridEP(HybridEPBuffer(comm, wide=wide), tokens=32)
        else:
            experts = comm.size * slots_per_rank
            switch = TokenSwitchNCCL(comm, experts, ROWS, row_bytes, wide=wide)
            dispatcher = TokenSwitch(switch, max_recv_tokens=ROWS)
        if wide:
            dispatcher.dtypes = (*dispatcher.dtypes, torch.float32, torch.float64)
        return dispatcher

    return make


def one_pass(layer, x, gradient):
    y = layer(x)
    y.backward(gradient)
    assert layer.balancer.config.policy == "none" or layer.last_plan.num_replicas > 0
    return {"y": y.detach(), **gradients_of(layer, x)}


def through_network(layer, x, gradient):
    """The same experts as `ExpertsFrom`."""
    return one_pass(with_network(layer), x, gradient)


def fixed(example, ids):
    """Return the example with these ids, and gates that are trained directly."""
    return replace(example, ids=ids)


def padded_ids(example, seed=0):
    """Skewed ids of all tokens, with padding: some choices, whole tokens, a whole rank."""
    draw = torch.Generator().manual_seed(seed)
    ids = []
    for rank, tokens in enumerate(example.tokens):
        scores = torch.rand(tokens, example.experts, generator=draw) * 4
        chosen = (scores - torch.arange(example.experts)).topk(example.top_k).indices
        chosen[torch.rand(chosen.shape, generator=draw) < 0.2] = -1
        chosen[:3] = -1
        ids.append(chosen if rank != 1 else torch.full_like(chosen, -1))
    return ids


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("work", [one_pass, through_network])
def test_equal_to_the_data_plane(name, work):
    """Outputs and all gradients, with biases and a rank without tokens."""
    ours = on_every_rank(EXAMPLE, work, slots=2)
    theirs = on_every_rank(EXAMPLE, work, slots=2, dispatcher=dispatcher_of(name))
    assert_same_tensors(theirs, ours)


@pytest.mark.parametrize("name", NAMES)
def test_padding(name):
    example = fixed(EXAMPLE, padded_ids(EXAMPLE))
    ours = on_every_rank(example, one_pass, slots=2)
    theirs = on_every_rank(example, one_pass, slots=2, dispatcher=dispatcher_of(name))
    assert_same_tensors(theirs, ours)
