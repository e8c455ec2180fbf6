"""Experts in eight bits: what they compute, what travels, and what learns."""

import copy
from functools import partial

import pytest
import torch
from dense import DenseMoE, Example, assert_close, gradients_of
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ultraep.ops.formats as formats
from ultraep import BalancedMoE, Balancer, ConfigError, Experts, LocalGroup, Router
from ultraep.bundle import Layout
from ultraep.layer import run_stages
from ultraep.microbatch import Layer
from ultraep.ops.formats import E4M3, FORMATS
from ultraep.ops.quantised import WEIGHTS

pytestmark = pytest.mark.usefixtures("one_thread")

by_name = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
OFF = 0.06  # of the largest output, by rounding to e4m3 in three places
TOKENS = [20, 12, 30]


def example(dtype=torch.float64, **options):
    return Example(TOKENS, experts=9, hidden=160, ffn=144, dtype=dtype, **options)


def on_ranks(given, form, policy="ultraep", **options):
    """Outputs, gradients, plan and bytes of every rank."""

    def work(comm):
        balancer = Balancer(experts=given.experts, communicator=comm, policy=policy, **options)
        layer = given.layer(balancer, quantised=form.name, bitwise=True)
        x = given.inputs[comm.rank].clone().requires_grad_()
        y = layer(x)
        y.backward(given.gradients[comm.rank])
        return y.detach(), gradients_of(layer, x), layer.last_plan, balancer.stats()

    return LocalGroup(len(TOKENS)).run(work)


def plain_again(form, weights):
    """Weights as they are multiplied."""
    data = torch.empty(weights.shape, dtype=E4M3)
    scales = torch.empty(form.scale_shape(tuple(weights.shape)), dtype=form.scale_type)
    formats.quantise(form, weights, data, scales)
    return formats.dequantise(form, data, scales, weights.dtype)


def dense_twin(given, form):
    """The layer at dequantised weights and rows: gradients are those of this network."""
    state = {name: tensor.clone() for name, tensor in given.state.items()}
    for name in WEIGHTS:
        state[f"experts.{name}"] = plain_again(form, state[f"experts.{name}"])
    return DenseMoE(state, given.top_k)


class StraightOn(torch.autograd.Function):
    """Rounds rows to eight bits; gradients pass."""

    @staticmethod
    def forward(ctx, rows, form):
        return formats.unpack(form, formats.pack(form, rows), rows.shape[1], rows.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@by_name
def test_gradients_are_those_of_the_dequantised_network(form):
    """But for what stands between the products: it is rounded in forward only."""
    given = example()
    results, twin = on_ranks(given, form), dense_twin(given, form)
    mix = twin.mix
    if form.packs:
        twin.mix = lambda tokens, ids, gates: mix(StraightOn.apply(tokens, form), ids, gates)
    x = torch.cat(given.inputs).requires_grad_()
    y = twin(x)
    y.backward(torch.cat(given.gradients))
    off = OFF if form.packs else None
    assert_close(torch.cat([r[0] for r in results]), y.detach(), "output", off)
    assert_close(torch.cat([r[1]["x"] for r in results]), x.grad, "x", 1e-5)
    order = results[0][2].topology.experts_by_rank.copy()
    for name in WEIGHTS:
        found = torch.cat([r[1][f"experts.{name}"] for r in results])
        expected = twin.gradient(f"experts.{name}")[torch.from_numpy(order)]
        assert_close(found, expected, name, 1e-5)


@by_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_balancing_changes_no_bit(form, dtype):
    given = example(dtype)
    balanced, alone = (on_ranks(given, form, policy) for policy in ("ultraep", "none"))
    assert balanced[0][2].num_replicas > 0
    for one, other in zip(balanced, alone, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1]["x"], other[1]["x"])


@by_name
def test_copies_have_half_of_the_bytes(form):
    """And scales: one of four bytes for 128 x 128 numbers, or a row of them; of one byte for 32."""
    sizes = [
        Layout.of(Experts(512, 256, [0], quantised=name, dtype=torch.bfloat16).bundle, 1).nbytes
        for name in (None, form.name)
    ]
    share = {"fp8": 2.0**-12, "fp8_rows": 4 / 384, "mxfp8": 1 / 32}[form.name]
    assert sizes[1] == pytest.approx(sizes[0] / 2 * (1 + share), rel=1e-3)


@by_name
def test_experts_of_a_checkpoint(form):
    """Given in eight bits they compute the same, are saved and moved as they are, and learn not."""
    full = Experts(64, 48, [0, 1], quantised=form.name)
    given = {name: tensor.clone() for name, tensor in full.bundle.items()}
    alone = Experts.from_quantised(form.name, given, [0, 1])
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    found = []
    for experts in (full, alone, alone.to(torch.bfloat16).float(), copy.deepcopy(alone)):
        balancer = Balancer("alone", experts=2)
        layer = BalancedMoE(Router(64, 2, top_k=1, seed=3), experts, balancer=balancer)
        rows = x.clone().requires_grad_()
        y = layer(rows)
        y.sum().backward()
        found.append((y.detach(), rows.grad))
        state = layer.full_state_dict()
        assert (state["experts.down_proj"].dtype == E4M3) == (experts is not full)
        layer.load_full_state_dict(state)
    for y, d_x in found[1:]:
        assert_close(y, found[0][0], "output", 1e-6)
        assert_close(d_x, found[0][1], "gradient", 1e-6)
    assert all(parameter.grad is None for parameter in alone.parameters())
    again = Experts.from_quantised(form.name, given, [0, 1])
    again.load_state_dict(alone.state_dict())


def test_full_weights_are_quantised_when_they_may_have_changed():
    balancer = Balancer("alone", experts=2)
    experts = Experts(64, 48, [0, 1], quantised="fp8")
    layer = BalancedMoE(Router(64, 2, top_k=1), experts, balancer=balancer)
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    before = layer(x)
    experts.down_proj.data.mul_(2.0)  # which torch does not count
    assert torch.equal(layer(x), 2 * before)
    with balancer.unchanged_weights():
        layer(x)
        experts.down_proj.data.mul_(2.0)
        assert torch.equal(layer(x), 2 * before)  # as promised
        balancer.weights_changed()
        assert torch.equal(layer(x), 4 * before)
        with torch.no_grad():
            experts.down_proj.mul_(0.25)
        assert torch.equal(layer(x), before)


@pytest.mark.parametrize("activation", ["clamped_swiglu", "geglu", "gelu"])
def test_other_activations_and_biases(activation):
    given = example(torch.float32, activation=activation, bias=True)

    def work(comm):
        balancer = Balancer(experts=given.experts, communicator=comm)
        homes = balancer.topology.home_experts(comm.rank).tolist()
        experts = Experts(
            given.hidden, given.ffn, homes, activation=activation, bias=True, quantised="fp8"
        )
        router = given.layer(balancer).router
        layer = BalancedMoE(router, experts, balancer=balancer)
        layer.load_full_state_dict(given.state)
        x = given.inputs[comm.rank].clone().requires_grad_()
        y = layer(x)
        y.backward(given.gradients[comm.rank])
        return y.detach(), gradients_of(layer, x)

    results = LocalGroup(len(TOKENS)).run(work)
    twin = given.twin()
    x = torch.cat(given.inputs).requires_grad_()
    y = twin(x)
    y.backward(torch.cat(given.gradients))
    for found, expected in (
        (torch.cat([r[0] for r in results]), y.detach()),
        (torch.cat([r[1]["x"] for r in results]), x.grad),
    ):
        assert (found - expected).norm() / expected.norm() < 0.1


def test_rows_of_other_dispatchers_are_packed_where_they_arrive():
    """Arrivals that came as they are give what packed ones give."""
    experts = Experts(64, 48, [0, 1], quantised="fp8")
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    ids, gates = torch.arange(20)[:, None] % 2, torch.ones(20, 1)
    found = []
    for pack in (None, experts.pack):
        balancer = Balancer("alone", experts=2)
        layer = Layer(0, experts.bundle, experts, pack)
        found.append(run_stages(balancer, layer, ids, gates, x)[0])
    assert_close(*found, "output", 1e-6)


def everything(*_args, **_options):
    return CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("keeps", [None, everything], ids=["again", "kept"])
def test_forward_may_be_computed_again(keeps):
    """In backward, all of it, or what selective checkpointing has not kept."""
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    contexts = (
        {}
        if keeps is None
        else {"context_fn": partial(create_selective_checkpoint_contexts, keeps)}
    )
    found = []
    for way in (lambda layer, rows: layer(rows), partial(checkpointed, **contexts)):
        layer = BalancedMoE.swiglu(
            64, 48, 2, 1, balancer=Balancer("alone", experts=2), quantised="fp8"
        )
        rows = x.clone().requires_grad_()
        way(layer, rows).square().sum().backward()
        found.append(gradients_of(layer, rows))
    for name, gradient in found[0].items():
        assert_close(gradient, found[1][name], name, 1e-6)


def checkpointed(layer, rows, **contexts):
    return checkpoint(layer, rows, use_reentrant=False, **contexts)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="unknown format 'fp4'; known are fp8, fp8_rows, mxfp8"):
        Experts(64, 48, [0], quantised="fp4")
    given = {n: t.clone() for n, t in Experts(256, 128, [0, 1], quantised="fp8").bundle.items()}
    with pytest.raises(ConfigError, match=r"must be \[1, N, K\].*got \[2, 256, 256\]"):
        Experts.from_quantised("fp8", given, [0])
    with pytest.raises(ConfigError, match=r"must be \[2, 256, 1\].*got \[2, 2, 2\]"):
        Experts.from_quantised("fp8_rows", given, [0, 1])
    with pytest.raises(ConfigError, match=r"torch.float8_e4m3fn, got .* torch.float32"):
        Experts.from_quantised("fp8", given | {"gate_up_proj": torch.ones(2, 256, 256)}, [0, 1])
    with pytest.raises(ConfigError, match="needs 'down_scales', got"):
        Experts.from_quantised("fp8", {n: given[n] for n in list(given)[:3]}, [0, 1])
    for wrong in (0.0, -1.0, torch.nan, torch.inf):
        given["down_scales"][0, 0, 0] = wrong
        with pytest.raises(
            ConfigError, match="must be positive and finite, but 1 of 4 scales are not"
        ):
            Experts.from_quantised("fp8", given, [0, 1])
    given = {n: t.clone() for n, t in Experts(64, 32, [0, 1], quantised="mxfp8").bundle.items()}
    Experts.from_quantised("mxfp8", given, [0, 1])
    given["gate_up_scales"][0, 0, 0] = 255  # ue8m0: not a number
    with pytest.raises(
        ConfigError, match="must be positive and finite, but 1 of 256 scales are not"
    ):
        Experts.from_quantised("mxfp8", given, [0, 1])
