"""The layer computes the outputs and gradients of its dense twin under every plan."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import draw_ids, with_padding
from dense import DenseMoE, Example, assert_close, assert_same, check, dense, on_ranks

from ultraep import BalanceConfig, BalancedMoE, Balancer, ConfigError, LoadError, LocalGroup
from ultraep.arrays import PADDING
from ultraep.backends.triton.device import interpreted
from ultraep.hops import MODES

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::ultraep.NothingToBalance"),  # some have no slots
]

FLOATS = [torch.float64, torch.float32]
EVERY = [*FLOATS, torch.bfloat16]


def replicas_of(results):
    return results[0].plan.num_replicas


def test_64_ranks():
    results = check(Example([5] * 64, experts=64, hidden=8, ffn=4))
    assert replicas_of(results) > 10


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        *({"slots": slots, "policy": p} for slots in (0, 2) for p in ("ultraep", "registered")),
        {"experts": [0, 0, 0, 0, 1, 2, 2, 3]},
        {"experts": [2, 1, 0, 0, 2, 1, 0, 3], "slots": 2},
        {"experts": [0, 0, 0, 0, 0, 2, 2, 2]},  # two ranks without homes
        {"experts": [1, 1, 1, 1, 1, 2, 2, 2], "slots": 2},
        {"experts": [2] * 8},
        {"domain": 2},
        {"domain": 1},
        {"domain": 2, "slots": 2, "experts": [0, 0, 0, 1, 2, 3, 3, 3]},
        {"relay": "direct", "slots": 2},
        {"relay": "chain"},
        {"relay": "chain", "slots": 2},
        {"in_flight": 2},
        {"backend": "reference"},
        {"config": BalanceConfig(locality=False)},
        {"config": BalanceConfig(tolerance=0.2)},
        {"config": BalanceConfig(min_tokens_per_replica=5, max_replicas=2)},
    ],
    ids=str,
)
def test_any_setting_of_the_balancer(options, dtype):
    results = check(Example([30] * 4, dtype=dtype), **options)
    possible = options.get("domain") != 1 and options.get("slots") != 0
    assert (replicas_of(results) > 0) == possible


@pytest.mark.parametrize("bitwise", [False, True])
def test_bfloat16(bitwise):
    example = Example([30] * 4, dtype=torch.bfloat16, bias=True, shared_ffn=8)
    results = check(example, layer_options={"bitwise": bitwise})
    assert replicas_of(results) > 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "tokens",
    [
        [40, 3, 17, 1],
        [0, 30, 0, 30],
        [0, 0, 0, 1],
        [0, 0, 0, 0],
        [(2, 7), (2, 3, 2), 5, (4, 1, 1, 2)],
        [(2, 0), 9, (3, 3), 0],
    ],
    ids=str,
)
def test_any_tokens_of_any_shape(tokens, dtype):
    example = Example(tokens, dtype=dtype, shared_ffn=4)
    for result, x in zip(check(example), example.inputs, strict=True):
        assert result.output.shape == x.shape
        assert result.gradients["x"].shape == x.shape


def test_inputs_that_are_not_contiguous():
    def work(comm):
        layer = example.layer(Balancer(comm, experts=8))
        x = example.inputs[comm.rank]
        wide = torch.zeros(2 * example.hidden, len(x), dtype=x.dtype).requires_grad_()
        view = wide.T[:, ::2] + x
        layer(view).sum().backward()  # the gradient is one expanded number
        return wide.grad.T[:, ::2]

    example = Example([20] * 2)
    gradients = LocalGroup(2).run(work)
    twin, x = example.twin(), torch.cat(example.inputs).requires_grad_()
    twin(x).sum().backward()
    assert_close(torch.cat(gradients), x.grad)


@pytest.mark.parametrize("garbage", ["largest", "inf", "nan"])
@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_padding_has_no_output_and_no_gradient(dtype, garbage):
    rng, example = np.random.default_rng(0), Example([25] * 4, top_k=3, dtype=dtype)
    ids = [with_padding(rng, draw_ids(rng, 25, 3, example, 1.0), 0.3) for _ in range(4)]
    ids[0][7] = ids[2][:] = PADDING  # a token without choices, and a rank without any
    example = replace(example, ids=ids)
    filled = torch.finfo(dtype).max if garbage == "largest" else float(garbage)
    for own, weights in zip(ids, example.choice_weights, strict=True):
        weights[own == PADDING] = filled
    results = on_ranks(example, slots=2)
    for own, weights, result in zip(ids, example.choice_weights, results, strict=True):
        weights[own == PADDING] = 0.0
        idle = (own == PADDING).all(dim=1)
        assert not result.gradients["router.weight"][own == PADDING].any()
        assert not result.output[idle].any()
        assert not result.gradients["x"][idle].any()
    plan = results[0].plan
    assert plan.num_replicas > 0
    assert plan.total == sum((own != PADDING).sum() for own in ids)
    assert_same(results, dense(example), plan.topology, fixed_router=True)


def test_a_gate_of_padding_that_overflows_the_dtype_of_the_rows():
    ids = [torch.tensor([[0, PADDING], [1, 0]])]
    example = Example([2], dtype=torch.bfloat16, ids=ids)
    example.choice_weights[0] = torch.tensor([[1.0, torch.finfo(torch.float32).max], [1.0, 1.0]])
    (result,) = on_ranks(example)
    assert result.output.isfinite().all()
    assert result.gradients["router.weight"][0, 1] == 0


PLANS = [
    {"policy": "none"},
    {"policy": "ultraep"},
    {"policy": "registered"},
    {"policy": "registered", "relay": "chain"},
    {"experts": [3, 3, 3, 3, 1, 1, 1, 1]},
    {"domain": 2, "experts": [0, 0, 0, 1, 2, 2, 2, 2]},
    {"config": BalanceConfig(locality=False)},
]


@pytest.mark.parametrize("dtype", EVERY, ids=str)
@pytest.mark.parametrize(("hidden", "ffn"), [(16, 24), (100, 37), (33, 65)])
def test_with_bitwise_all_plans_give_the_same_bits(hidden, ffn, dtype):
    example = Example([70, 33, 1, 64], hidden=hidden, ffn=ffn, dtype=dtype, bias=True, skew=2.0)
    plain, *others = (
        on_ranks(example, layer_options={"bitwise": True}, **{"slots": 2, **options})
        for options in PLANS
    )
    for results in others:
        assert replicas_of(results) > 0
        for result, expected in zip(results, plain, strict=True):
            assert torch.equal(result.output, expected.output)
            for name in ("x", "router.weight"):
                assert torch.equal(result.gradients[name], expected.gradients[name]), name


@pytest.mark.parametrize("dtype", EVERY, ids=str)
@pytest.mark.parametrize(
    "runs",
    [
        [{}] * 3,
        [{"layer_options": {"bitwise": True}}] * 3,
        [{"backend": "cpu"}, {"backend": "reference"}, {"kernels": interpreted()}],
        [{"relay": mode} for mode in MODES],
    ],
    ids=["runs", "bitwise runs", "backends", "relay modes"],
)
def test_the_same_bits(runs, dtype):
    """Two runs, all backends and all relay modes give the same outputs and gradients."""
    example = Example([50, 20, 30, 40], dtype=dtype, bias=True, shared_ffn=8)
    first, *others = (on_ranks(example, slots=2, **options) for options in runs)
    assert replicas_of(first) > 0
    for results in others:
        for result, expected in zip(results, first, strict=True):
            assert torch.equal(result.output, expected.output)
            assert result.gradients.keys() == expected.gradients.keys()
            for name, gradient in expected.gradients.items():
                assert torch.equal(result.gradients[name], gradient), name


def test_weights_of_another_dtype_are_cast_to_the_dtype_of_the_tokens():
    example = Example([20] * 2, dtype=torch.float32)

    def work(comm):
        layer = example.layer(Balancer(comm, experts=8), dtype=torch.bfloat16)
        y = layer(example.inputs[comm.rank])
        assert y.dtype == torch.float32
        y.backward(example.gradients[comm.rank])
        assert layer.experts.down_proj.grad.dtype == torch.bfloat16
        return y.detach()

    rounded = {name: tensor.bfloat16().float() for name, tensor in example.state.items()}
    expected = DenseMoE(rounded, 2)(torch.cat(example.inputs))
    assert_close(torch.cat(LocalGroup(2).run(work)), expected.detach())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_model_starts_with_the_same_weights_on_any_number_of_ranks(ranks):
    def state_of(balancer, seed=3):
        options = {"bias": True, "router_bias": True, "shared_ffn": 5, "seed": seed}
        return BalancedMoE.swiglu(6, 4, 8, 2, balancer=balancer, **options).full_state_dict()

    alone = state_of(Balancer("alone", experts=8))
    for state in LocalGroup(ranks).run(lambda comm: state_of(Balancer(comm, experts=8))):
        assert state.keys() == alone.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in alone.items())
    other = state_of(Balancer("alone", experts=8), seed=4)
    for name in ("router.weight", "experts.down_proj", "shared.down.weight"):
        assert not torch.equal(other[name], alone[name])
        assert len(alone[name].unique()) == alone[name].numel()


def test_invalid_inputs_and_settings():
    balancer = Balancer("alone", experts=8)
    with pytest.raises(ConfigError, match="4 experts, but the balancer has 8"):
        BalancedMoE.swiglu(6, 4, 4, 2, balancer=balancer)
    for top_k in (0, 9):
        with pytest.raises(ConfigError, match=f"top_k must lie between 1 and 8.*{top_k}"):
            BalancedMoE.swiglu(6, 4, 8, top_k, balancer=balancer)
    with pytest.raises(ConfigError, match="scores must be one of softmax, sigmoid, got 'relu'"):
        BalancedMoE.swiglu(6, 4, 8, 2, balancer=balancer, scores="relu")
    layer = BalancedMoE.swiglu(6, 4, 8, 2, balancer=balancer)
    with pytest.raises(LoadError, match=r"tokens must be \[\.\.\., 6\], got \[3, 5\]"):
        layer(torch.zeros(3, 5))
    with pytest.raises(ConfigError, match="unknown policy 'fair'"):
        layer(torch.zeros(3, 6), policy="fair")
    assert layer(torch.zeros(3, 6)).shape == (3, 6)  # still works


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_gates_of_scores_that_underflow(scores):
    """The bias selects experts whose scores, 1e-60, are zero in float32."""
    layer = BalancedMoE.swiglu(
        2, 4, 4, 2, balancer=Balancer("alone", experts=4), scores=scores, router_bias=True
    )
    with torch.no_grad():
        layer.router.weight[:] = torch.tensor([[300.0, 0], [200.0, 0], [-140.0, 0], [-140.0, 1.0]])
        layer.router.bias[:] = torch.tensor([0.0, 0.0, 5.0, 5.0])
    x = torch.tensor([[1.0, 0.0], [1.0, 2.0]], requires_grad=True)
    ids, gates, logits = layer.router(x)
    assert logits.shape == (2, 4)
    assert sorted(ids[0].tolist()) == [2, 3]
    of_third = gates.gather(-1, (ids == 3).int().argmax(-1, keepdim=True))[:, 0]
    assert_close(of_third.detach(), torch.sigmoid(torch.tensor([0.0, 2.0])), "", 1e-5)
    layer(x).sum().backward()
    assert x.grad.isfinite().all()
    assert layer.router.weight.grad.isfinite().all()


@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16])
def test_parameters_have_the_default_dtype(default):
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        options = {"shared_ffn": 4, "bias": True, "router_bias": True}
        layer = BalancedMoE.swiglu(8, 4, 4, 2, balancer=Balancer("alone", experts=4), **options)
    finally:
        torch.set_default_dtype(before)
    assert {t.dtype for t in layer.state_dict().values()} == {default}
