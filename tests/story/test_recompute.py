"""Backward uses the tensors and slots of its own forward pass, and releases the slots."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from dense import (
    Example,
    assert_close,
    assert_same_tensors,
    gradients_of,
    network,
    with_network,
)
from microbatches import planned
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ultraep import Balancer, ConfigError, LocalGroup, UltraEPError, serve
from ultraep.dispatch import Arrivals

pytestmark = pytest.mark.usefixtures("one_thread")

TWO = Example([20, 16], experts=4)


def on_ranks(body, **options):
    def work(comm):
        return body(Balancer._with_settings(comm, experts=TWO.experts, **options))

    return LocalGroup(TWO.ranks).run(work)


# Checkpointing


def several_layers(balancer, around):
    """Two layers with hot experts on different ranks, in one checkpoint."""
    examples = [Example(TWO.tokens, experts=4, skew=skew, seed=3) for skew in (2.0, -2.0)]
    layers = [example.layer(balancer) for example in examples]
    balanced = [with_network(layer) for layer in layers]
    x = TWO.inputs[balancer.rank].clone().requires_grad_()

    def forward(x):
        for layer in balanced:
            x = x + layer(x)
        return x

    around(forward, x).square().sum().backward()
    assert all(layer.last_plan.num_replicas for layer in balanced)
    return gradients_of(nn.ModuleList(layers), x)


@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_several_layers(buffers, reentrant):
    again = partial(checkpoint, use_reentrant=reentrant)
    recomputed = on_ranks(partial(several_layers, around=again), in_flight=buffers)
    plain = on_ranks(partial(several_layers, around=lambda forward, x: forward(x)))
    assert_same_tensors(recomputed, plain)


def skipping(rows, counts, tensors):
    """Run the network without the experts that have no rows."""
    used = [index for index, count in enumerate(counts) if count]
    own = {name: [stack[index] for index in used] for name, stack in tensors.items()}
    return network(rows, [counts[index] for index in used], own)


def first_microbatch(balancer, around):
    layer, x = TWO.layer(balancer), TWO.inputs[balancer.rank].clone().requires_grad_()
    around(with_network(layer, skipping), x).square().sum().backward()
    return gradients_of(layer, x)


def test_selective_checkpointing_of_the_first_microbatch():
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    selective = partial(checkpoint, use_reentrant=False, context_fn=contexts)
    recomputed = on_ranks(partial(first_microbatch, around=selective))
    plain = on_ranks(partial(first_microbatch, around=lambda layer, x: layer(x)))
    assert_same_tensors(recomputed, plain)


# Second derivatives


def linear(rows, counts, tensors):
    return torch.cat([part @ w for part, w in zip(rows.split(counts), tensors["w"], strict=True)])


def served(balancer, bundle, gates, ids, tokens):
    """Return `[T, D]` outputs of one rank that sorts its rows itself, like other dispatchers."""
    microbatch, _ = planned(balancer, ids, bundle, gates=gates, tokens=tokens)
    with microbatch.replicate() as replicas:
        exchange = microbatch.reroute()
        order = exchange.slots.flatten().argsort(stable=True)
        token_of_row = order // ids.shape[1]
        arrivals = Arrivals(tokens[token_of_row], gates.flatten()[order], exchange)
        outputs = serve(linear, arrivals, replicas)
    return torch.zeros_like(tokens).index_add(0, token_of_row, outputs)


def one_rank(comm, *, learns):
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(8, 16, 16, generator=draw, dtype=torch.float64, requires_grad=learns)
    logits = torch.randn(100, 2, generator=draw, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 8, (100, 2), generator=draw)
    tokens = torch.randn(100, 16, generator=draw, dtype=torch.float64)
    balancer = Balancer(comm, experts=8)
    return logits, lambda: served(balancer, {"w": weights}, logits.softmax(1), ids, tokens)


def test_a_second_derivative_through_another_dispatcher_is_refused():
    def work(comm):
        logits, forward = one_rank(comm, learns=True)
        y = forward()
        (first,) = torch.autograd.grad(y.sum(), [logits], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            (y.square().sum() + first.square().sum()).backward()

    LocalGroup(1).run(work)


# Released slots


def test_two_microbatches_in_one_backward_when_only_gates_learn():
    def work(comm):
        logits, forward = one_rank(comm, learns=False)
        (forward().sum() + forward().sum()).backward()
        both, logits.grad = logits.grad, None
        forward().sum().backward()
        assert_close(both, 2 * logits.grad)

    LocalGroup(1).run(work)


class Failure(Exception):
    pass


class Raising:
    """The network. With `fails`, its backward raises once."""

    def __init__(self, *, fails):
        self.fails = fails

    def __call__(self, *inputs):
        outputs = network(*inputs)
        if outputs.requires_grad:
            outputs.register_hook(self._raise)
        return outputs

    def _raise(self, _):
        if self.fails:
            self.fails = False
            raise Failure


@pytest.mark.parametrize("retry", ["new forward", "same graph", "earlier forward"])
def test_after_an_exception_in_backward_the_next_step_has_the_right_gradients(retry):
    def body(balancer, *, fails):
        layer, rank = TWO.layer(balancer), balancer.rank
        moe = with_network(layer, Raising(fails=fails))
        x = TWO.inputs[rank].clone().requires_grad_()
        first = moe(x)
        second = moe(x) if retry == "earlier forward" else None
        if fails:
            with pytest.raises(Failure):
                first.backward(TWO.gradients[rank], retain_graph=True)
        layer.zero_grad()
        x.grad = None
        y = {"new forward": moe, "same graph": lambda _: first}.get(retry, lambda _: second)(x)
        y.backward(TWO.gradients[rank])
        return gradients_of(layer, x)

    assert_same_tensors(*(on_ranks(partial(body, fails=fails)) for fails in (True, False)))


def test_an_exception_in_backward_on_one_rank_stops_all_ranks():
    stopped = []

    def body(balancer):
        layer = TWO.layer(balancer)
        moe, x = with_network(layer, Raising(fails=balancer.rank == 0)), TWO.inputs[balancer.rank]
        try:
            moe(x).sum().backward()
        except Failure:
            with pytest.raises(UltraEPError):
                moe(x)
        except UltraEPError:
            stopped.append(balancer.rank)
            raise

    with pytest.raises(UltraEPError, match=r"rank 1 is at all_to_all, rank 0 at all_gather"):
        on_ranks(body)
    assert stopped == [1]


# Promises


class Held(nn.Module):
    """Weights of home experts, which a bundle gets from methods."""

    def __init__(self, layer):
        super().__init__()
        self.up = nn.Parameter(layer.experts.gate_up_proj.detach().clone())
        self.down = nn.Parameter(layer.experts.down_proj.detach().clone())

    def bundle(self):
        return {"gate_up_proj": self.get_up, "down_proj": self.get_down}

    def get_up(self):
        return self.up

    def get_down(self):
        return self.down


def layer_of_functions(balancer):
    """Return a layer whose weights are returned by functions, and its input."""
    layer = TWO.layer(balancer)
    held = Held(layer)
    moe = with_network(layer, bundle=held.bundle())
    moe.held = held
    return moe, TWO.inputs[balancer.rank]


@torch.no_grad()
def tripled(module):
    for parameter in module.parameters():
        parameter.mul_(3)


def test_a_deep_copy_is_another_layer():
    def body(balancer):
        moe, x = layer_of_functions(balancer)
        other = deepcopy(moe)
        assert other.layer_index != moe.layer_index
        tripled(other.held)
        with torch.no_grad():
            expected = other(x)
            with balancer.unchanged_weights():
                moe(x)
                assert_close(other(x), expected)

    on_ranks(body)


def test_two_layers_with_the_same_index_have_their_own_replicas():
    def body(balancer):
        layers = [layer_of_functions(balancer) for _ in range(2)]
        tripled(layers[1][0].held)
        for moe, _ in layers:
            moe.layer_index = 0
        with torch.no_grad():
            outputs = [moe(x) for moe, x in layers]
            with balancer.unchanged_weights():
                for (moe, x), expected in zip(layers * 2, outputs * 2, strict=True):
                    assert_close(moe(x), expected)

    on_ranks(body)


@pytest.mark.parametrize("fused", [True, False])
def test_a_promise_notices_steps_of_optimizers(fused):
    def body(balancer):
        moe, x = layer_of_functions(balancer)
        for parameter in moe.held.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.SGD(moe.held.parameters(), lr=0.1, fused=fused)
        with torch.no_grad(), balancer.unchanged_weights():
            moe(x)
            optimizer.step()
            promised = moe(x)
        with torch.no_grad():
            assert_close(promised, moe(x))

    on_ranks(body)


def test_tensors_can_be_swapped_after_weights_changed():
    def body(balancer):
        layer = TWO.layer(balancer)
        moe, x = with_network(layer), TWO.inputs[balancer.rank]
        weight = layer.experts.down_proj
        other = nn.Parameter(3 * weight.detach())
        with torch.no_grad(), balancer.unchanged_weights():
            moe(x)
            with pytest.raises(RuntimeError, match="weakref"):
                torch.utils.swap_tensors(weight, other)
            balancer.weights_changed()
            torch.utils.swap_tensors(weight, other)
            promised = moe(x)
        with torch.no_grad():
            assert_close(promised, moe(x))

    on_ranks(body)


def test_functions_whose_values_change_are_refused():
    def body(balancer):
        layer = TWO.layer(balancer)
        dropped = {
            name: lambda w=weight: nn.functional.dropout(w, 0.5)
            for name, weight in layer.experts.bundle.items()
        }
        with pytest.raises(ConfigError, match="'gate_up_proj' returned different values in two"):
            with_network(layer, bundle=dropped)(TWO.inputs[balancer.rank])

    on_ranks(body)
