"""A balanced layer through the dispatchers of other libraries equals the layer of the data plane.

The compiled parts of the libraries are strict stand-ins (stand_ins.py).
"""

from dataclasses import replace
from itertools import pairwise

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


@pytest.mark.parametrize("name", NAMES)
def test_single_precision(name):
    example = replace(EXAMPLE, dtype=torch.float32, top_k=3)
    ours = on_every_rank(example, one_pass, slots=2)
    theirs = on_every_rank(example, one_pass, slots=2, dispatcher=dispatcher_of(name))
    assert_close_tensors(theirs, ours, 1e-5)


def assert_close_tensors(actual, expected, tolerance):
    for own, others in zip(actual, expected, strict=True):
        assert own.keys() == others.keys()
        for name, tensor in others.items():
            assert_close(own[name], tensor, name, tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_as_the_libraries_take_it(name):
    """Nothing but documented dtypes; gradients of gates are exact to single precision."""
    example = fixed(replace(EXAMPLE, dtype=torch.bfloat16), padded_ids(EXAMPLE))
    ours = on_every_rank(example, one_pass, slots=2)
    make = dispatcher_of(name, wide=False, row_bytes=32)
    assert_close_tensors(on_every_rank(example, one_pass, slots=2, dispatcher=make), ours, 2e-2)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_with_different_numbers_of_home_experts(name):
    """Slot ids are those of the rank with the most slots; the others have unused ones."""
    example = fixed(replace(EXAMPLE, experts=10), padded_ids(replace(EXAMPLE, experts=10)))
    options = {"slots": 2, "homes": [0, 0, 0, 0, 1, 1, 3, 3, 3, 3]}
    ours = on_every_rank(example, one_pass, **options)
    make = dispatcher_of(name, slots_per_rank=6)
    assert_same_tensors(on_every_rank(example, one_pass, dispatcher=make, **options), ours)
    assert even_homes(10, 4) != options["homes"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute(name, reentrant):
    """Backward uses the handle of the recomputed pass, whose rows arrive in another order."""

    def recomputed(layer, x, gradient):
        y = checkpoint(layer, x, use_reentrant=reentrant)
        y.backward(gradient)
        return {"y": y.detach(), **gradients_of(layer, x)}

    ours = on_every_rank(EXAMPLE, one_pass, slots=2)
    theirs = on_every_rank(EXAMPLE, recomputed, slots=2, dispatcher=dispatcher_of(name))
    assert_same_tensors(theirs, ours)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reverse", [False, True])
def test_microbatches_in_flight(name, reverse):
    """Two forward passes with other tokens, then both backward passes, in any order."""

    def both(layer, x, gradient):
        xs = [x, x.detach().flip(0).mul(0.5).requires_grad_()]
        ys = [layer(one) for one in xs]
        for y in reversed(ys) if reverse else ys:
            y.backward(gradient)
        return {"y": ys[1].detach(), "x1": xs[1].grad, **gradients_of(layer, x)}

    ours = on_every_rank(EXAMPLE, both, slots=2, in_flight=2)
    theirs = on_every_rank(EXAMPLE, both, slots=2, in_flight=2, dispatcher=dispatcher_of(name))
    assert_same_tensors(theirs, ours)


@pytest.mark.parametrize("name", NAMES)
def test_fp8_rows_pass_with_their_scales(name):
    """Bit for bit as without balancing, and as the bytes that the data plane delivers."""
    example = Example([9, 0, 12, 7], hidden=512, ffn=128, dtype=torch.bfloat16)
    options = {"slots": 2, "layer_options": {"quantised": "fp8", "bitwise": True}}
    make = dispatcher_of(name, wide=False, row_bytes=1024)
    runs = {
        policy: on_every_rank(example, packed_pass, dispatcher=make, policy=policy, **options)
        for policy in ("ultraep", "none")
    }
    ours = on_every_rank(example, packed_pass, **options)
    for balanced, plain, built_in in zip(runs["ultraep"], runs["none"], ours, strict=True):
        assert torch.equal(balanced["y"], plain["y"])
        assert balanced["packed"] == built_in["packed"]
        for key in balanced.keys() - {"packed", "y"}:
            assert_close(balanced[key], built_in[key], key)


def packed_pass(layer, x, gradient):
    """A pass that also returns the packed rows of each slot, in any order."""
    seen = []
    layer.experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    y = layer(x)
    y.backward(gradient)
    packed = [sorted(bytes(row) for row in slot.numpy()) for slot in rows_by_slot(seen[0])]
    return {"y": y.detach(), "packed": packed, **gradients_of(layer, x)}


def rows_by_slot(arrivals):
    begins = arrivals.begins()
    return arrivals.packed[: begins[-1]].split([e - b for b, e in pairwise(begins)])


@pytest.mark.parametrize("name", NAMES)
def test_a_token_is_sent_once_to_each_rank(name):
    """The dispatcher sees slot ids, so rows of one token for several slots travel together."""
    example = replace(EXAMPLE, top_k=4, skew=0.0)
    dispatchers = {}

    def make(comm):
        dispatchers[comm.rank] = dispatcher_of(name)(comm)
        return dispatchers[comm.rank]

    def forward(layer, x, gradient):
        with torch.no_grad():
            layer(x)
        return layer.last_plan.total

    total = on_every_rank(example, forward, slots=2, dispatcher=make)[0]
    libraries = [getattr(d, "buffer", None) or d.switch for d in dispatchers.values()]
    assert 0 < sum(one.tokens_sent for one in libraries) < total


@pytest.mark.parametrize("name", NAMES)
def test_stages_are_timed(name):
    """Observers see the same stages as with the rows of the data plane, each ended once."""

    class Stages:
        def __init__(self):
            self.events = []

        def begin(self, stage, microbatch):
            self.events.append(("begin", stage))

        def end(self, stage, microbatch):
            self.events.append(("end", stage))

        def planned(self, *_):
            pass

        def sent(self, *_):
            pass

    def observed(layer, x, gradient):
        stages = Stages()
        layer.balancer.observe(stages)
        one_pass(layer, x, gradient)
        return stages.events

    ours = on_every_rank(EXAMPLE, observed, slots=2)
    assert on_every_rank(EXAMPLE, observed, slots=2, dispatcher=dispatcher_of(name)) == ours
