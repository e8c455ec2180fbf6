"""A balanced layer through the dispatchers of other libraries equals the layer of the data plane.

The compiled parts of the libraries are strict stand-ins (stand_ins.py).
"""

from dataclasses import replace
from functools import partial
from itertools import accumulate

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
from permuting import Differentiable
from stand_ins import Buffer, ElasticBuffer, HybridEPBuffer, library
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ultraep import LocalGroup
from ultraep.dispatch import SlotRoutes
from ultraep.dispatchers.deepep import DeepEP, DeepEPBuffer
from ultraep.dispatchers.hybridep import HybridEP

pytestmark = pytest.mark.usefixtures("one_thread", "libraries")

EXAMPLE = Example([30, 20, 0, 25], experts=8, bias=True)
NAMES = ("DeepEP", "DeepEPBuffer", "HybridEP")
AUTOGRAD = "a dispatcher with autograd of its own"

each_library = pytest.mark.parametrize("name", NAMES)
every_dispatcher = pytest.mark.parametrize("name", [*NAMES, AUTOGRAD])
REST = [pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:]]
one_of_each_kind = pytest.mark.parametrize("name", [NAMES[0], AUTOGRAD, *REST])


@pytest.fixture
def libraries(monkeypatch):
    """Pretend that the libraries are installed."""
    library(monkeypatch, "deep_ep", "2.1.0")


def dispatcher_of(name, *, wide=True, deterministic=False):

    def make(comm):
        if name == AUTOGRAD:
            return Differentiable(comm)
        if name == "DeepEP":
            dispatcher = DeepEP(ElasticBuffer(comm, wide=wide, deterministic=deterministic))
        elif name == "DeepEPBuffer":
            dispatcher = DeepEPBuffer(Buffer(comm, wide=wide))
        else:
            dispatcher = HybridEP(HybridEPBuffer(comm, wide=wide), tokens=32)
        dispatcher.width_multiple = 1  # of small examples
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
    return one_pass(with_network(layer), x, gradient)


def fixed(example, ids):
    """Return the example with these ids, and gates that are trained directly."""
    return replace(example, ids=ids)


def padded_ids(example, seed=0):
    draw = torch.Generator().manual_seed(seed)
    ids = []
    for rank, tokens in enumerate(example.tokens):
        scores = torch.rand(tokens, example.experts, generator=draw) * 4
        chosen = (scores - torch.arange(example.experts)).topk(example.top_k).indices
        chosen[torch.rand(chosen.shape, generator=draw) < 0.2] = -1
        chosen[:3] = -1
        ids.append(chosen if rank != 1 else torch.full_like(chosen, -1))
    return ids


def recomputed(layer, x, gradient, *, reentrant=True):
    """Backward uses the handle of the recomputed pass, whose rows arrive in another order."""
    y = checkpoint(layer, x, use_reentrant=reentrant)
    y.backward(gradient)
    return {"y": y.detach(), **gradients_of(layer, x)}


def selective(layer, x, gradient):
    """A dispatch mode may keep the results of ops; the ops of a dispatcher are hidden from it."""
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = partial(create_selective_checkpoint_contexts, kept)
    y = checkpoint(with_network(layer), x, use_reentrant=False, context_fn=contexts)
    y.backward(gradient)
    return {"y": y.detach(), **gradients_of(layer, x)}


def two_in_flight(layer, x, gradient, *, reverse=False):
    """Two forward passes with other tokens, then both backward passes, in any order."""
    xs = [x, x.detach().flip(0).mul(0.5).requires_grad_()]
    ys = [layer(one) for one in xs]
    for y in reversed(ys) if reverse else ys:
        y.backward(gradient)
    return {"y": ys[1].detach(), "x1": xs[1].grad, **gradients_of(layer, x)}


def frozen(layer, x, gradient, *, what):
    layer.experts.requires_grad_(what != "experts")
    layer.router.requires_grad_(what not in ("router", "all but the experts"))
    x.requires_grad_(what not in ("tokens", "all but the experts"))
    passed = one_pass(layer, x, gradient)
    assert ("experts.down_proj" in passed) == (what != "experts")
    return passed


def inference(layer, x, gradient):
    with torch.inference_mode():
        return {"y": layer(x)}


def several_layers(layer, x, gradient):
    """Two layers with different hot experts, one after the other."""
    other = with_network(replace(EXAMPLE, skew=-1.5).layer(layer.balancer))
    y = x + layer(x)
    (y + other(y)).backward(gradient)
    assert layer.balancer.settings.dispatcher is None or ", rows by " in repr(layer.balancer)
    return gradients_of(layer, x)


TEN = replace(EXAMPLE, experts=10)
# Ranks with different numbers of home experts: slot ids are those of the rank with most slots.
UNEVEN = {"experts": [0, 0, 0, 0, 1, 1, 3, 3, 3, 3]}
DOMAINS = {"domain": 2, "data_plane": "hybrid"}  # replicas stay inside of their domains
IN_FLIGHT = {"in_flight": 2}
CASES = {  # example, work, options of the balancer
    "experts": (EXAMPLE, one_pass, {}),
    "a network": (EXAMPLE, through_network, {}),
    "padding": (fixed(EXAMPLE, padded_ids(EXAMPLE)), one_pass, {}),
    "uneven homes": (fixed(TEN, padded_ids(TEN)), one_pass, UNEVEN),
    "recompute": (EXAMPLE, recomputed, {}),
    "recompute, not reentrant": (EXAMPLE, partial(recomputed, reentrant=False), {}),
    "in flight": (EXAMPLE, two_in_flight, IN_FLIGHT),
    "in flight, reversed": (EXAMPLE, partial(two_in_flight, reverse=True), IN_FLIGHT),
}
ONCE = {  # for one dispatcher of each kind
    "domains": (EXAMPLE, one_pass, DOMAINS),
    "inference": (EXAMPLE, inference, {}),
    "several layers": (EXAMPLE, several_layers, IN_FLIGHT),
}
ONCE |= {
    f"frozen: {what}": (EXAMPLE, partial(frozen, what=what), {})
    for what in ("experts", "tokens", "router", "all but the experts")
}


def assert_equal_to_the_data_plane(name, example, work, options):
    """Outputs and all gradients, with biases and a rank without tokens."""
    make = dispatcher_of(name)
    ours = on_every_rank(example, work, slots=2, **options)
    theirs = on_every_rank(example, work, slots=2, dispatcher=make, **options)
    assert_same_tensors(theirs, ours)


@every_dispatcher
@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_data_plane(name, case):
    assert_equal_to_the_data_plane(name, *CASES[case])


@one_of_each_kind
@pytest.mark.parametrize("case", ONCE)
def test_equal_to_the_data_plane_in_other_settings(name, case):
    assert_equal_to_the_data_plane(name, *ONCE[case])


@pytest.mark.parametrize("name", ["DeepEPBuffer", "HybridEP", AUTOGRAD, "DeepEP"])
def test_selective_checkpointing_of_ordered_rows(name):
    make = dispatcher_of(name, deterministic=True)
    theirs = on_every_rank(EXAMPLE, selective, slots=2, dispatcher=make)
    assert_same_tensors(theirs, on_every_rank(EXAMPLE, selective, slots=2))


def assert_close_tensors(actual, expected, tolerance):
    for own, others in zip(actual, expected, strict=True):
        assert own.keys() == others.keys()
        for name, tensor in others.items():
            assert_close(own[name], tensor, name, tolerance)


@each_library
def test_bfloat16_as_the_libraries_take_it(name):
    """Nothing but documented dtypes; gradients of gates are exact to single precision."""
    example = fixed(replace(EXAMPLE, dtype=torch.bfloat16), padded_ids(EXAMPLE))
    ours = on_every_rank(example, one_pass, slots=2)
    make = dispatcher_of(name, wide=False)
    assert_close_tensors(on_every_rank(example, one_pass, slots=2, dispatcher=make), ours, 2e-2)


@each_library
def test_gates_travel_in_single_precision(name):
    """There and back, beside bfloat16 rows, without rounding; padding yields zeros."""
    slots = [torch.tensor([[0, 3], [2, -1], [1, 0], [-1, -1]]), torch.tensor([[3, 2]])]
    counts = [[2, 1], [2, 2]]

    def there_and_back(comm):
        dispatcher = dispatcher_of(name, wide=False)(comm)
        begins = [0, *accumulate(counts[comm.rank])]
        offsets, own = torch.tensor(begins, dtype=torch.int32), slots[comm.rank]
        rows = dispatcher.begin(SlotRoutes(own, offsets, lambda: begins, comm.rank, 2, 2))
        gates = torch.randn(own.shape, generator=torch.Generator().manual_seed(comm.rank))
        arrived, scalars = rows.to_slots(torch.ones(len(own), 16, dtype=torch.bfloat16), gates)
        assert list(rows.counts) == counts[comm.rank]
        sums, back = rows.to_tokens(arrived, scalars)
        assert back.dtype == torch.float32
        assert torch.equal(back, gates * (own >= 0))
        assert torch.equal(sums[:, 0], (own >= 0).sum(dim=1).to(torch.bfloat16))

    LocalGroup(2).run(there_and_back)


@each_library
def test_fp8_experts_quantise_rows_on_arrival(name):
    """Bit for bit as with rows that the data plane sends in FP8."""
    example = Example([6, 5], experts=4, hidden=64, ffn=64, dtype=torch.bfloat16)
    options = {"slots": 2, "layer_options": {"quantised": "fp8", "bitwise": True}}
    make = dispatcher_of(name, wide=False)
    theirs = on_every_rank(example, one_pass, dispatcher=make, **options)
    for actual, expected in zip(theirs, on_every_rank(example, one_pass, **options), strict=True):
        assert torch.equal(actual["y"], expected["y"])
        for key in actual:
            assert_close(actual[key], expected[key], key)


@each_library
def test_a_token_is_sent_once_to_each_rank(name):
    """The dispatcher sees slot ids, so rows of one token for several slots travel together."""
    example = replace(EXAMPLE, top_k=4, skew=0.0)
    dispatchers = {}

    def make(comm):
        dispatchers[comm.rank] = dispatcher_of(name)(comm)
        return dispatchers[comm.rank]

    def forward(layer, x, gradient):
        dispatcher = dispatchers[layer.balancer.rank]
        library = dispatcher.buffer
        with torch.no_grad():
            layer(x)  # also sends the rows of the probe
            before = library.tokens_sent
            layer(x)
        return layer.last_plan.total, library.tokens_sent - before

    results = on_every_rank(example, forward, dispatcher=make, slots=2)
    assert 0 < sum(sent for _, sent in results) < results[0][0]


@one_of_each_kind
def test_stages_are_timed(name):
    """Passes have the same stages as with the rows of the data plane."""

    def observed(layer, x, gradient):
        records = []
        layer.balancer.subscribe(records.append)
        one_pass(layer, x, gradient)
        return [[stage for stage, _ in record.timeline] for record in records]

    ours = on_every_rank(EXAMPLE, observed, slots=2)
    assert on_every_rank(EXAMPLE, observed, slots=2, dispatcher=dispatcher_of(name)) == ours
