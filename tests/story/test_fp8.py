"""FP8 experts: outputs, gradients, and the bytes of replicas."""

import copy
from functools import partial

import pytest
import torch
from dense import DenseMoE, Example, assert_close, dense, gradients_of, on_every_rank, on_ranks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ultraep import BalancedMoE, Balancer, ConfigError, Experts, Router
from ultraep.bundle import Layout
from ultraep.ops.fp8 import E4M3, SCALES, dequantise, pack, parts, quantise

pytestmark = pytest.mark.usefixtures("one_thread")

ERROR = 0.06  # relative to the largest output, from rounding to e4m3 in three places


def example(dtype=torch.float64, **options):
    return Example([20, 12, 30], experts=9, hidden=160, ffn=144, dtype=dtype, **options)


def fp8_on_ranks(problem, policy="ultraep"):
    layer_options = {"quantised": "fp8", "bitwise": True}
    return on_ranks(problem, layer_options=layer_options, policy=policy)


def rounded(weights):
    codes = torch.empty(weights.shape, dtype=E4M3)
    scales = torch.empty(*weights.shape[:-1], 1)
    quantise(weights, codes, scales)
    return dequantise(codes, scales, weights.dtype)


def dense_twin(problem):
    state = {name: tensor.clone() for name, tensor in problem.state.items()}
    for name in SCALES:
        state[f"experts.{name}"] = rounded(state[f"experts.{name}"])
    return DenseMoE(state, problem.top_k)


class Rounded(torch.autograd.Function):
    """Rounds rows to FP8; gradients pass unchanged."""

    @staticmethod
    def forward(ctx, rows):
        return dequantise(*parts(pack(rows), rows.shape[1]), rows.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_gradients_equal_the_gradients_of_the_dequantised_network():
    """The twin does not round the activations between the products."""
    problem = example()
    results, twin = fp8_on_ranks(problem), dense_twin(problem)
    mix = twin.mix
    twin.mix = lambda tokens, ids, gates: mix(Rounded.apply(tokens), ids, gates)
    x = torch.cat(problem.inputs).requires_grad_()
    y = twin(x)
    y.backward(torch.cat(problem.gradients))
    assert_close(torch.cat([r.output for r in results]), y.detach(), "output", ERROR)
    assert_close(torch.cat([r.gradients["x"] for r in results]), x.grad, "x", 1e-5)
    order = results[0].plan.topology.experts_by_rank.copy()
    for name in SCALES:
        actual = torch.cat([r.gradients[f"experts.{name}"] for r in results])
        expected = twin.gradient(f"experts.{name}")[torch.from_numpy(order)]
        assert_close(actual, expected, name, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_balanced_outputs_have_the_same_bits(dtype):
    problem = example(dtype)
    balanced, plain = (fp8_on_ranks(problem, name) for name in ("ultraep", "none"))
    assert balanced[0].plan.num_replicas > 0
    for result, expected in zip(balanced, plain, strict=True):
        assert torch.equal(result.output, expected.output)
        assert torch.equal(result.gradients["x"], expected.gradients["x"])


def test_replicas_have_half_of_the_bytes_of_bfloat16():
    """Scales add four bytes for each row of a weight."""
    sizes = [
        Layout.of(Experts(512, 256, [0], quantised=name, dtype=torch.bfloat16).bundle, 1).nbytes
        for name in (None, "fp8")
    ]
    assert sizes[1] == pytest.approx(sizes[0] / 2 * (1 + 4 / 384), rel=1e-3)


def pass_of(experts):
    """Return outputs, gradients of rows, and the layer of one rank."""
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    balancer = Balancer("alone", experts=2)
    layer = BalancedMoE(Router(64, 2, top_k=1, seed=3), experts, balancer=balancer)
    y = layer(x)
    y.sum().backward()
    return y.detach(), x.grad, layer


def test_frozen_experts():
    """They compute the same, keep their dtypes when saved or moved, and are not trained."""
    full = Experts(64, 48, [0, 1], quantised="fp8", bias=True)
    y, d_x, _ = pass_of(full)
    tensors = {name: tensor.detach().clone() for name, tensor in full.bundle.items()}
    frozen = copy.deepcopy(full).freeze()
    loaded = Experts(64, 48, [0, 1], quantised="fp8", bias=True, seed=1).freeze()
    loaded.load_state_dict(tensors)
    moved = copy.deepcopy(loaded).to(torch.bfloat16).float()
    for experts in (frozen, loaded, moved):
        actual, d_actual, layer = pass_of(experts)
        assert_close(actual, y, "output", 1e-6)
        assert_close(d_actual, d_x, "gradient", 1e-6)
        state = layer.full_state_dict()
        assert state["experts.down_proj"].dtype == E4M3
        layer.load_full_state_dict(state)
        assert all(parameter.grad is None for parameter in experts.parameters())
        assert experts.freeze() is experts
    with pytest.raises(RuntimeError, match="size mismatch for gate_up_scales"):
        loaded.load_state_dict(tensors | {"gate_up_scales": torch.ones(2, 2, 2)})  # of blocks


def test_refusals():
    with pytest.raises(ConfigError, match="quantised must be one of fp8, got 'mxfp8'"):
        Experts(64, 48, [0], quantised="mxfp8")
    with pytest.raises(ConfigError, match=r"freeze\(\) needs FP8 experts"):
        Experts(64, 48, [0, 1]).freeze()


def test_trained_weights_are_quantised_in_every_forward_pass():
    experts = Experts(64, 48, [0, 1], quantised="fp8")
    before, _, layer = pass_of(experts)
    assert layer.full_state_dict()["experts.down_proj"].dtype == torch.float32
    experts.down_proj.data.mul_(2.0)  # torch does not count this write
    assert torch.equal(pass_of(experts)[0], 2 * before)


@pytest.mark.parametrize("activation", ["clamped_swiglu", "geglu", "gelu"])
def test_other_activations_and_biases(activation):
    problem = example(torch.float32, activation=activation, bias=True)

    def work(layer, x, gradient):
        options = {"activation": activation, "bias": True, "quantised": "fp8"}
        homes = list(layer.experts.home_experts)
        experts = Experts(problem.hidden, problem.ffn, homes, **options)
        layer = BalancedMoE(layer.router, experts, balancer=layer.balancer)
        layer.load_full_state_dict(problem.state)
        y = layer(x)
        y.backward(gradient)
        return y.detach(), x.grad

    results, expected = on_every_rank(problem, work), dense(problem)
    outputs, gradients = (torch.cat(parts) for parts in zip(*results, strict=True))
    for actual, right in ((outputs, expected.output), (gradients, expected.gradients["x"])):
        assert (actual - right).norm() / right.norm() < 0.1


def save_all(*_args, **_options):
    return CheckpointPolicy.MUST_SAVE


SELECTIVE = {"context_fn": partial(create_selective_checkpoint_contexts, save_all)}


@pytest.mark.parametrize("options", [{}, SELECTIVE], ids=["all", "selective"])
def test_activation_checkpointing(options):
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    checkpointed = partial(checkpoint, use_reentrant=False, **options)
    gradients = []
    for run in (lambda layer, rows: layer(rows), checkpointed):
        layer = BalancedMoE.swiglu(
            64, 48, 2, 1, balancer=Balancer("alone", experts=2), quantised="fp8"
        )
        rows = x.clone().requires_grad_()
        run(layer, rows).square().sum().backward()
        gradients.append(gradients_of(layer, rows))
    for name, gradient in gradients[0].items():
        assert_close(gradient, gradients[1][name], name, 1e-6)
