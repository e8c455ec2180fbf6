"""FP8 experts: outputs, gradients, and the bytes of replicas."""

import copy
from functools import partial

import pytest
import torch
from dense import (
    DenseMoE,
    Example,
    assert_close,
    dense,
    gradients_of,
    on_every_rank,
    on_ranks,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ultraep.ops.formats as formats
from ultraep import BalancedMoE, Balancer, ConfigError, Experts, Router
from ultraep.bundle import Layout
from ultraep.layer import run_stages
from ultraep.microbatch import Layer
from ultraep.ops.formats import E4M3, FORMATS
from ultraep.ops.quantised import WEIGHTS

pytestmark = pytest.mark.usefixtures("one_thread")

each_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
ERROR = 0.06  # relative to the largest output, from rounding to e4m3 in three places


def example(dtype=torch.float64, **options):
    return Example([20, 12, 30], experts=9, hidden=160, ffn=144, dtype=dtype, **options)


def quantised_on_ranks(problem, form, policy="ultraep"):
    layer_options = {"quantised": form.name, "bitwise": True}
    return on_ranks(problem, layer_options=layer_options, policy=policy)


def rounded(form, weights):
    """Quantise and dequantise weights."""
    data = torch.empty(weights.shape, dtype=E4M3)
    scales = torch.empty(form.scale_shape(tuple(weights.shape)), dtype=form.scale_type)
    formats.quantise(form, weights, data, scales)
    return formats.dequantise(form, data, scales, weights.dtype)


def dense_twin(problem, form):
    """Return the dense twin with rounded weights."""
    state = {name: tensor.clone() for name, tensor in problem.state.items()}
    for name in WEIGHTS:
        state[f"experts.{name}"] = rounded(form, state[f"experts.{name}"])
    return DenseMoE(state, problem.top_k)


class Rounded(torch.autograd.Function):
    """Rounds rows to FP8; gradients pass unchanged."""

    @staticmethod
    def forward(ctx, rows, form):
        return formats.unpack(form, formats.pack(form, rows), rows.shape[1], rows.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@each_format
def test_gradients_equal_the_gradients_of_the_dequantised_network(form):
    """The twin does not round the activations between the products."""
    problem = example()
    results, twin = quantised_on_ranks(problem, form), dense_twin(problem, form)
    mix = twin.mix
    if form.packs:
        twin.mix = lambda tokens, ids, gates: mix(Rounded.apply(tokens, form), ids, gates)
    x = torch.cat(problem.inputs).requires_grad_()
    y = twin(x)
    y.backward(torch.cat(problem.gradients))
    tolerance = ERROR if form.packs else None
    assert_close(torch.cat([r.output for r in results]), y.detach(), "output", tolerance)
    assert_close(torch.cat([r.gradients["x"] for r in results]), x.grad, "x", 1e-5)
    order = results[0].plan.topology.experts_by_rank.copy()
    for name in WEIGHTS:
        actual = torch.cat([r.gradients[f"experts.{name}"] for r in results])
        expected = twin.gradient(f"experts.{name}")[torch.from_numpy(order)]
        assert_close(actual, expected, name, 1e-5)


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_balanced_outputs_have_the_same_bits(form, dtype):
    problem = example(dtype)
    balanced, plain = (quantised_on_ranks(problem, form, name) for name in ("ultraep", "none"))
    assert balanced[0].plan.num_replicas > 0
    for result, expected in zip(balanced, plain, strict=True):
        assert torch.equal(result.output, expected.output)
        assert torch.equal(result.gradients["x"], expected.gradients["x"])


@each_format
def test_replicas_have_half_of_the_bytes_of_bfloat16(form):
    """Scales add four bytes for 128 x 128 numbers or for a row, or one byte for 32 numbers."""
    sizes = [
        Layout.of(Experts(512, 256, [0], quantised=name, dtype=torch.bfloat16).bundle, 1).nbytes
        for name in (None, form.name)
    ]
    share = {"fp8": 2.0**-12, "fp8_rows": 4 / 384, "mxfp8": 1 / 32}[form.name]
    assert sizes[1] == pytest.approx(sizes[0] / 2 * (1 + share), rel=1e-3)


@each_format
def test_experts_of_a_checkpoint(form):
    """FP8 tensors compute the same, keep their dtypes when saved or moved, and are not trained."""
    full = Experts(64, 48, [0, 1], quantised=form.name)
    tensors = {name: tensor.clone() for name, tensor in full.bundle.items()}
    fixed = Experts.from_quantised(form.name, tensors, [0, 1])
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    results = []
    for experts in (full, fixed, fixed.to(torch.bfloat16).float(), copy.deepcopy(fixed)):
        balancer = Balancer("alone", experts=2)
        layer = BalancedMoE(Router(64, 2, top_k=1, seed=3), experts, balancer=balancer)
        rows = x.clone().requires_grad_()
        y = layer(rows)
        y.sum().backward()
        results.append((y.detach(), rows.grad))
        state = layer.full_state_dict()
        assert (state["experts.down_proj"].dtype == E4M3) == (experts is not full)
        layer.load_full_state_dict(state)
    for y, d_x in results[1:]:
        assert_close(y, results[0][0], "output", 1e-6)
        assert_close(d_x, results[0][1], "gradient", 1e-6)
    assert all(parameter.grad is None for parameter in fixed.parameters())
    again = Experts.from_quantised(form.name, tensors, [0, 1])
    again.load_state_dict(fixed.state_dict())


def test_weights_are_quantised_again_if_they_may_have_changed():
    balancer = Balancer("alone", experts=2)
    experts = Experts(64, 48, [0, 1], quantised="fp8")
    layer = BalancedMoE(Router(64, 2, top_k=1), experts, balancer=balancer)
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    before = layer(x)
    experts.down_proj.data.mul_(2.0)  # torch does not count this write
    assert torch.equal(layer(x), 2 * before)
    with balancer.unchanged_weights():
        layer(x)
        experts.down_proj.data.mul_(2.0)
        assert torch.equal(layer(x), 2 * before)  # the promise
        balancer.weights_changed()
        assert torch.equal(layer(x), 4 * before)
        with torch.no_grad():
            experts.down_proj.mul_(0.25)
        assert torch.equal(layer(x), before)


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


def test_unpacked_rows_give_the_same_outputs():
    """Rows of other dispatchers are packed on arrival."""
    experts = Experts(64, 48, [0, 1], quantised="fp8")
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    ids, gates = torch.arange(20)[:, None] % 2, torch.ones(20, 1)
    outputs = []
    for pack in (None, experts.pack):
        balancer = Balancer("alone", experts=2)
        layer = Layer(0, experts.bundle, experts, pack)
        outputs.append(run_stages(balancer, layer, ids, gates, x)[0])
    assert_close(*outputs, "output", 1e-6)


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


def test_invalid_tensors_are_refused():
    with pytest.raises(ConfigError, match="unknown format 'fp4'; choose from fp8, fp8_rows, mxfp8"):
        Experts(64, 48, [0], quantised="fp4")
    tensors = {n: t.clone() for n, t in Experts(256, 128, [0, 1], quantised="fp8").bundle.items()}
    with pytest.raises(ConfigError, match=r"must be \[1, N, K\].*got \[2, 256, 256\]"):
        Experts.from_quantised("fp8", tensors, [0])
    with pytest.raises(ConfigError, match=r"must be \[2, 256, 1\].*got \[2, 2, 2\]"):
        Experts.from_quantised("fp8_rows", tensors, [0, 1])
    with pytest.raises(ConfigError, match=r"torch.float8_e4m3fn, got .* torch.float32"):
        Experts.from_quantised("fp8", tensors | {"gate_up_proj": torch.ones(2, 256, 256)}, [0, 1])
    with pytest.raises(ConfigError, match="needs 'down_scales', got"):
        Experts.from_quantised("fp8", {n: tensors[n] for n in list(tensors)[:3]}, [0, 1])
    for wrong in (0.0, -1.0, torch.nan, torch.inf):
        tensors["down_scales"][0, 0, 0] = wrong
        with pytest.raises(
            ConfigError, match="must be positive and finite, but 1 of 4 scales are not"
        ):
            Experts.from_quantised("fp8", tensors, [0, 1])
    tensors = {n: t.clone() for n, t in Experts(64, 32, [0, 1], quantised="mxfp8").bundle.items()}
    Experts.from_quantised("mxfp8", tensors, [0, 1])
    tensors["gate_up_scales"][0, 0, 0] = 255  # ue8m0: not a number
    with pytest.raises(
        ConfigError, match="must be positive and finite, but 1 of 256 scales are not"
    ):
        Experts.from_quantised("mxfp8", tensors, [0, 1])
