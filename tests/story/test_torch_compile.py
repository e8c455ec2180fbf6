"""Compiled blocks with a balanced layer: one graph, and the same numbers as without a compiler.

Ranks are processes: torch compiles in one thread at a time.
"""

import copy
import functools
import gc
import itertools
import shutil
import warnings

import pytest
import torch
from dense import Example, assert_close, assert_same_tensors, gradients_of, with_network
from ranks import on_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ultraep import Balancer, ConfigError, LoadError
from ultraep.layer import Routing
from ultraep.ops import recompute
from ultraep.ops.compiled_op import routed_experts

EXAMPLE = Example([20, 30], bias=True, shared_ffn=4)
SINGLE = Example([20, 30], bias=True, shared_ffn=4, dtype=torch.float32)
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor needs C++"
)


class Block(nn.Module):
    """Dense layers around a balanced layer; the first bias keeps the skew of the router."""

    def __init__(self, layer, like):
        super().__init__()
        width, generator = like.shape[-1], torch.Generator().manual_seed(0)
        self.before, self.after = (nn.Linear(width, width).to(like.dtype) for _ in range(2))
        self.layer = layer
        with torch.no_grad():
            for parameter in (*self.before.parameters(), *self.after.parameters()):
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.3 * drawn)
            self.before.bias[0] = 3.0

    def forward(self, x, **options):
        x = x + self.layer(torch.tanh(self.before(x)), **options)
        return self.after(torch.relu(x))


def block_on(rank, balancer, example=EXAMPLE, adapt=lambda layer: layer, **options):
    return Block(adapt(example.layer(balancer, **options)), example.inputs[rank])


def whole_graph(module, backend="aot_eager", **options):
    torch.compiler.reset()
    counters.clear()
    return torch.compile(module, backend=backend, fullgraph=True, **options)


def one_pass(module, block, rank, example=EXAMPLE, begin=0):
    block.zero_grad()
    x = example.inputs[rank][begin:].clone().requires_grad_()
    y = module(x)
    y.backward(example.gradients[rank][begin:].to(y.dtype))
    return {"y": y.detach(), **gradients_of(block, x)}


def num_graphs():
    return counters["stats"]["unique_graphs"]


def per_expert(layer):
    stacks = layer.experts.bundle.items()
    lists = {name: [nn.Parameter(t.clone()) for t in stack.detach()] for name, stack in stacks}
    return with_network(layer, bundle=lists)


def by_function(layer):
    experts = layer.experts
    names = experts.bundle
    functions = {name: functools.partial(getattr, experts, name) for name in names}
    return with_network(layer, bundle=functions)


ADAPTED = {
    "experts": lambda layer: layer,
    "experts of a network": with_network,
    "a tensor for each expert": per_expert,
    "functions": by_function,
}
slow, long = pytest.mark.slow, pytest.mark.long


@pytest.mark.parametrize(
    ("adapted", "backend"),
    [
        ("experts", "aot_eager"),
        ("experts of a network", "aot_eager"),
        *(pytest.param(adapted, "eager", marks=long) for adapted in ADAPTED),
        *(pytest.param(adapted, "aot_eager", marks=slow) for adapted in list(ADAPTED)[2:]),
    ],
)
@on_ranks(2)
def test_a_compiled_block_equals_eager(rank, group, adapted, backend):
    balancer = Balancer(group, experts=8)
    block = block_on(rank, balancer, adapt=ADAPTED[adapted])
    weights = block.layer.experts.weights()  # another module may own them
    expected = one_pass(block, block, rank)
    outside = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    actual = one_pass(whole_graph(block, backend), block, rank)
    assert_same_tensors([actual], [expected])
    for weight, gradient in zip(weights, outside, strict=True):
        assert_close(weight.grad, gradient)
    assert num_graphs() == 1
    assert not counters["graph_break"]
    assert block.layer.last_plan.num_replicas > 0


INDUCTOR = [("experts", "float64"), ("experts of a network", "float32")]  # in make test-slow


@needs_compiler
@pytest.mark.parametrize(
    ("adapted", "dtype"),
    [
        pytest.param(*case, marks=slow if case in INDUCTOR else long)
        for case in itertools.product(ADAPTED, ("float64", "float32"))
    ],
)
@on_ranks(2)
def test_inductor(rank, group, adapted, dtype):
    example = EXAMPLE if dtype == "float64" else SINGLE
    warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)  # torch's own
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # no child processes
    block = block_on(rank, Balancer(group, experts=8), example, ADAPTED[adapted])
    expected = one_pass(block, block, rank, example)
    actual = one_pass(whole_graph(block, "inductor"), block, rank, example)
    tolerance = 1e-12 if example is EXAMPLE else 1e-5
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, name, tolerance)


@on_ranks(2)
def test_microbatches_of_any_size_share_a_graph(rank, group):
    block = block_on(rank, Balancer(group, experts=8))
    compiled = whole_graph(block)
    for begin in (0, 3, 11):
        expected = one_pass(block, block, rank, begin=begin)
        actual = one_pass(compiled, block, rank, begin=begin)
        assert_same_tensors([actual], [expected])
    assert num_graphs() == 2  # for the first size, and for any size
    without = (len(EXAMPLE.inputs[0]), 0)[rank]  # rank 0 has no tokens
    expected = one_pass(block, block, rank, begin=without)
    assert_same_tensors([one_pass(compiled, block, rank, begin=without)], [expected])


@slow
@on_ranks(2)
def test_many_layers_share_a_graph(rank, group):
    """torch refuses the ninth graph of a function."""
    balancer = Balancer(group, experts=8)
    layers = nn.Sequential(*(block_on(rank, balancer) for _ in range(10)))
    expected = one_pass(layers, layers, rank)
    whole_graph(layers)
    for block in layers:
        block.compile(backend="aot_eager", fullgraph=True)
    assert_same_tensors([one_pass(layers, layers, rank)], [expected])
    assert num_graphs() == 1


def saving(names):
    """Return a checkpointing policy that saves the results of these operators."""
    policies = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE

    def policy(_, op, *__, **___):
        return policies[any(name in str(op) for name in names)]

    return functools.partial(create_selective_checkpoint_contexts, policy)


CONTEXTS = {
    "all again": {},
    "products saved": {"context_fn": saving(["mm"])},
    "routed experts saved": {"context_fn": saving(["ultraep"])},
}


@pytest.mark.parametrize(
    ("contexts", "inside"),
    [
        ("all again", True),
        *(pytest.param(contexts, False, marks=long) for contexts in CONTEXTS),
        *(pytest.param(contexts, True, marks=slow) for contexts in list(CONTEXTS)[1:]),
    ],
)
@on_ranks(2)
def test_activation_checkpointing(rank, group, contexts, inside):
    """Inside: the compiler sees the checkpoint. Outside: torch checkpoints a compiled block."""
    balancer = Balancer(group, experts=8)
    block = block_on(rank, balancer)
    expected, options = one_pass(block, block, rank), {"use_reentrant": False, **CONTEXTS[contexts]}
    recomputed = []
    balancer.subscribe(lambda record: recomputed.append(record.kind))
    if inside:
        module = whole_graph(lambda x: checkpoint(block, x, **options))
    else:
        compiled = whole_graph(block)
        module = functools.partial(checkpoint, compiled, **options)
    for _ in range(2):
        assert_same_tensors([one_pass(module, block, rank)], [expected])
    again = ["recomputed forward"] * (contexts != "routed experts saved")
    assert recomputed == 2 * ["forward", *again, "backward"]


@slow
@pytest.mark.parametrize("adapted", ["experts", "experts of a network"])
@on_ranks(2)
def test_autocast(rank, group, adapted):
    block = block_on(rank, Balancer(group, experts=8), SINGLE, ADAPTED[adapted])
    results = []
    warnings.filterwarnings("ignore", "mkldnn_matmul failed")
    for module in (block, whole_graph(block)):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(one_pass(module, block, rank, SINGLE))
        assert results[-1]["y"].dtype == torch.bfloat16
    for name, tensor in results[0].items():
        assert_close(results[1][name], tensor, name, tolerance=0.02)


@on_ranks(2)
def test_without_gradients(rank, group):
    balancer = Balancer(group, experts=8)
    block, x = block_on(rank, balancer), EXAMPLE.inputs[rank]
    compiled, expected = whole_graph(block), block(x)
    before = len(recompute._states)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = compiled(x)
        assert_close(y, expected)
        assert not y.requires_grad
        assert y.is_inference() == (mode is torch.inference_mode)
    assert len(recompute._states) == before
    assert balancer.stats()["gradients_bytes_sent"] == 0


@slow
@on_ranks(2)
def test_options_of_a_call(rank, group):
    layer = EXAMPLE.layer(Balancer(group, experts=8))
    x, compiled = EXAMPLE.inputs[rank], whole_graph(layer)
    expected, expected_routing = layer(x, with_routing=True)
    y, routing = compiled(x, with_routing=True)
    assert isinstance(routing, Routing)
    for actual, tensor in zip((y, *routing), (expected, *expected_routing), strict=True):
        assert_close(actual, tensor, tolerance=1e-12)
    assert layer.last_plan.num_replicas > 0
    assert_close(compiled(x, policy="none"), layer(x, policy="none"))
    compiled(x, policy="none")
    assert layer.last_plan.num_replicas == 0


@on_ranks(2)
def test_hooks_of_parameters_run_once(rank, group):
    layer = EXAMPLE.layer(Balancer(group, experts=8))
    expected, calls = one_pass(layer, layer, rank), []
    weight = layer.experts.down_proj
    weight.register_hook(lambda gradient: calls.append("gradient") or 2 * gradient)
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    actual = one_pass(whole_graph(layer), layer, rank)
    assert calls == ["gradient", "accumulated"]
    assert_close(actual["experts.down_proj"], 2 * expected["experts.down_proj"])


@on_ranks(2)
def test_backward_frees_what_forward_keeps(rank, group):
    block = block_on(rank, Balancer(group, experts=8))
    compiled, x = whole_graph(block), EXAMPLE.inputs[rank]
    before = len(recompute._states)
    y = compiled(x)
    assert len(recompute._states) > before
    y.sum().backward()
    del y
    compiled(x)  # a step without backward
    gc.collect()
    assert len(recompute._states) == before


@slow
@on_ranks(2)
def test_quantised_experts(rank, group):
    example = Example([20, 30], hidden=128, ffn=128, dtype=torch.float32)
    block = block_on(rank, Balancer(group, experts=8), example, quantised="fp8")
    expected = one_pass(block, block, rank, example)
    actual = one_pass(whole_graph(block), block, rank, example)
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, name, 5e-3)  # a rounded row may differ by one bit


@slow
@on_ranks(2)
def test_a_copy_is_another_layer(rank, group):
    block = block_on(rank, Balancer(group, experts=8))
    copied, compiled = copy.deepcopy(block), whole_graph(block)
    expected = one_pass(compiled, block, rank)
    with torch.no_grad():
        block.layer.experts.down_proj.zero_()
    block.layer.last_plan = None
    copied.compile(backend="aot_eager", fullgraph=True)
    assert_same_tensors([one_pass(copied, copied, rank)], [expected])
    assert copied.layer.last_plan is not None
    assert block.layer.last_plan is None
    assert copied.layer.layer_index != block.layer.layer_index


class Outside(nn.Module):
    """A router that chooses an expert that does not exist."""

    def forward(self, tokens):
        shape = len(tokens), 2
        return torch.full(shape, 8), torch.ones(shape, dtype=tokens.dtype)


@on_ranks(1)
def test_errors_of_stages_arrive_as_they_are(rank, group):
    layer = EXAMPLE.layer(Balancer(group, experts=8))
    layer.router = Outside()
    with pytest.raises(LoadError, match="8"):
        layer(EXAMPLE.inputs[0])
    for backend in ("eager", "aot_eager"):
        with pytest.raises(LoadError, match="8"):
            whole_graph(layer, backend)(EXAMPLE.inputs[0])


def test_a_graph_whose_layer_was_deleted():
    layer = EXAMPLE.layer(Balancer("alone", experts=8))
    tokens = EXAMPLE.inputs[0]
    ids, gates, _ = layer.router(tokens)
    handle, weights = layer._handle, layer.experts.weights()
    routed_experts(handle, tokens, ids, gates, weights)
    del layer
    gc.collect()
    with pytest.raises(ConfigError, match="no longer exists"):
        routed_experts(handle, tokens, ids, gates, weights)
