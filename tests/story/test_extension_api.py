"""Networks of other frameworks on home weights and replicas compute what `Experts` computes."""

from itertools import pairwise

import pytest
import torch
from dense import (
    Example,
    assert_close,
    assert_same_tensors,
    gradients_of,
    network,
    on_every_rank,
    with_network,
)
from microbatches import planned
from permuting import Permuting
from torch import nn

from ultraep import (
    BalancedMoE,
    Balancer,
    ConfigError,
    ExpertsFrom,
    LocalGroup,
    SlotError,
    UltraEPError,
    serve,
)
from ultraep.dispatch import Arrivals
from ultraep.microbatch import Layer
from ultraep.parallel import ShardedState, expert_parameters

pytestmark = pytest.mark.usefixtures("one_thread")


def passes(make, *, freeze=lambda layer, x: None, **options):
    """Return a pass through `make(layer)`: its output and all gradients."""

    def body(layer, x, gradient):
        freeze(layer, x)
        moe = make(layer)
        y = moe(x, **options)
        y.backward(gradient)
        assert options or moe.last_plan.num_replicas > 0
        return {"y": y.detach(), **gradients_of(layer, x)}

    return body


EXAMPLE = Example([30, 20, 25], experts=9, bias=True)


def unstacked(layer):
    """One tensor for every expert; their gradients must still reach the stacks of the layer."""
    return {name: list(stack.unbind()) for name, stack in layer.experts.bundle.items()}


@pytest.mark.parametrize("frozen", ["experts", "tokens", "experts and router", "some tensors"])
def test_frozen_tensors(frozen):
    def freeze(layer, x):
        layer.experts.requires_grad_("experts" not in frozen)
        layer.router.requires_grad_("router" not in frozen)
        if frozen == "some tensors":
            layer.experts.down_proj.requires_grad_(False)
            layer.experts.gate_up_bias.requires_grad_(False)
        x.requires_grad_(frozen != "tokens")

    results = on_every_rank(EXAMPLE, passes(with_network, freeze=freeze))
    if frozen != "some tensors":  # `Experts` computes the other gradients, too
        ours = passes(lambda layer: layer, freeze=freeze)
        assert_same_tensors(results, on_every_rank(EXAMPLE, ours))
    assert ("experts.down_proj" in results[0]) == (frozen == "tokens")


def test_parameters_of_a_network_are_expert_parameters():
    balancer = Balancer("alone", experts=8)
    layer = Example([4]).layer(balancer)
    model = nn.ModuleDict({"own": layer.experts, "moe": with_network(layer)})
    assert expert_parameters(model).keys() == {"own.gate_up_proj", "own.down_proj"}
    assert layer.experts.down_proj.expert_ranks == (0,)


@pytest.mark.parametrize("which", ["router", "some of the experts", "tokens"])
def test_gradients_of_some_tensors_only(which):
    """Backward releases the slots and all ranks take part, whatever it leaves out."""

    def body(layer, x, gradient):
        tensors = {
            "router": layer.router.weight,
            "some of the experts": layer.experts.down_bias,
            "tokens": x,
        }
        gradients = []
        for moe in (with_network(layer), layer):
            gradients += torch.autograd.grad(moe(x), [tensors[which]], gradient)
            moe(x)
        assert_close(*gradients, which)

    on_every_rank(EXAMPLE, body)


def test_a_full_state_without_the_tensors_of_experts_is_refused():
    layer = Example([4]).layer(Balancer("alone", experts=8))
    with pytest.raises(ConfigError, match="cannot collect the weights of ExpertsFrom"):
        with_network(layer).full_state_dict()


def test_checkpoints_hold_the_parameters_of_a_network():
    layer = Example([4]).layer(Balancer("alone", experts=8))
    own = nn.ParameterDict(layer.experts.bundle)
    model = nn.ModuleDict({"own": own, "moe": with_network(layer)})
    state = ShardedState(model).state_dict()
    assert {f"model.own.down_proj.{expert}" for expert in range(8)} <= state.keys()
    lists = nn.ModuleDict({"moe": with_network(layer, bundle=unstacked(layer))})
    with pytest.raises(ConfigError, match="'gate_up_proj' is 8 tensors, one for each home expert"):
        ShardedState(lists).state_dict()


# Refusals


def alone(run, example=None):
    layer = (example or Example([6])).layer(Balancer("alone", experts=8))
    return with_network(layer, run), layer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda rows: rows[:, :-1], r"must return \[1, 16\] torch.float64, got \[1, 15\]"),
        (lambda rows: rows.float(), r"must return \[1, 16\] torch.float64, got \[1, 16\] torch.fl"),
    ],
)
def test_a_network_with_wrong_outputs_is_refused_before_anything_is_sent(wrong, words):
    moe, layer = alone(lambda rows, counts, tensors: wrong(network(rows, counts, tensors)))
    with pytest.raises(ConfigError, match=words):
        moe(Example([6]).inputs[0])
    assert layer.balancer.stats()["microbatches"] == 0


def test_tensors_that_do_not_fit_the_homes_are_refused():
    balancer = Balancer("alone", experts=8)
    layer = Example([6]).layer(balancer)
    few = {name: stack[:3] for name, stack in layer.experts.bundle.items()}
    with pytest.raises(ConfigError, match=r"'gate_up_proj' must be stacked over 8 home experts"):
        with_network(layer, bundle=few)(Example([6]).inputs[0])
    lists = {"w": [torch.zeros(2)] * 7 + [torch.zeros(3)]}
    with pytest.raises(ConfigError, match="'w' must have one shape and dtype for all home experts"):
        with_network(layer, bundle=lists)(Example([6]).inputs[0])
    with pytest.raises(ConfigError, match=r"home experts of rank 0, \[0, 1, 2.*; got \[0, 1\]"):
        BalancedMoE(layer.router, ExpertsFrom(network, {}, [0, 1]), balancer=balancer)


def test_replicas_are_refused_outside_of_their_block():
    example = Example([20, 20])

    def body(layer, x, gradient):
        ids, gates, _ = layer.router(x)
        bundle = layer.experts.bundle
        microbatch, _ = planned(layer.balancer, ids, bundle, gates=gates, tokens=x)
        with microbatch.replicate() as replicas:
            microbatch.reroute()
            arrivals = microbatch.dispatch()
        with pytest.raises(SlotError, match="only inside their `with` block"):
            serve(network, arrivals, replicas)

    on_every_rank(example, body)


def test_trainable_tensors_outside_of_the_bundle_are_refused():
    extra = nn.Parameter(torch.ones((), dtype=torch.float64))
    moe, layer = alone(lambda rows, counts, tensors: network(rows, counts, tensors) * extra)
    layer.requires_grad_(False)
    with pytest.raises(ConfigError, match="trainable tensors that are not in its bundle"):
        moe(Example([6]).inputs[0])


# A dispatcher of another library sends rows to slots instead of experts.


class Foreign:
    """A layer with its own dispatcher, which calls plan, replicate and reroute."""

    def __init__(self, layer):
        self.layer, self.balancer, self.last_plan = layer, layer.balancer, None
        topology = self.balancer.topology
        self.dispatcher = Permuting(self.balancer.comm, topology.first_slot_of_rank)

    def __call__(self, x):
        ids, gates, _ = self.layer.router(x)
        layer = Layer(0, self.layer.experts.bundle)
        microbatch = self.balancer.begin(layer, ids, gates, x)
        microbatch.count()
        self.last_plan = microbatch.plan()
        with microbatch.replicate() as replicas:
            exchange = microbatch.reroute()
            rows, gates, counts, back = self.dispatcher.dispatch(x, exchange.slots, gates)
            begins = exchange.begins()
            assert counts == [end - begin for begin, end in pairwise(begins)]
            outputs = serve(network, Arrivals(rows, gates, exchange), replicas)
        y = self.dispatcher.combine(outputs, back)
        y.register_hook(lambda _: exchange.begin_backward())
        return y


def test_slots_are_physical_experts_of_any_dispatcher():
    """Outputs and all gradients are those of `BalancedMoE`."""
    ours = on_every_rank(EXAMPLE, passes(lambda layer: layer), slots=2)
    foreign = on_every_rank(EXAMPLE, passes(Foreign), slots=2)
    assert_same_tensors(foreign, ours)


def test_microbatches_in_flight():
    """Two forward passes, then their backward passes in the order of a pipeline."""

    def both(layer, x, gradient):
        moe = Foreign(layer)
        xs = [x, x.detach().clone().requires_grad_()]
        ys = [moe(x if index == 0 else x.flip(0)) for index, x in enumerate(xs)]
        for y in ys:
            y.backward(gradient)
        return {"y0": ys[0].detach(), "x1": xs[1].grad, **gradients_of(layer, xs[0])}

    balanced, plain = (on_every_rank(EXAMPLE, both, policy=p) for p in ("ultraep", "none"))
    assert_same_tensors(balanced, plain)


class Sorting:
    """The dispatcher of one rank, which can be differentiated twice."""

    def dispatch(self, tokens, slots, gates):
        order = slots.flatten().argsort(stable=True)
        token_of_row = order // slots.shape[1]
        counts = slots.flatten().bincount(minlength=Example([20]).experts + 1).tolist()
        return tokens[token_of_row], gates.flatten()[order], counts, (tokens, token_of_row)

    def combine(self, outputs, state):
        tokens, token_of_row = state
        return torch.zeros_like(tokens).index_add(0, token_of_row, outputs)


def test_a_second_derivative_is_refused():
    def work(layer, x, gradient):
        moe = Foreign(layer)
        moe.dispatcher = Sorting()
        y = moe(x)
        (first,) = torch.autograd.grad(y.sum(), [layer.router.weight], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            (y.square().sum() + first.square().sum()).backward()

    on_every_rank(Example([20]), work)


def test_two_microbatches_in_one_backward_when_only_gates_learn():
    def work(layer, x, gradient):
        layer.experts.requires_grad_(False)
        moe, tokens, weight = Foreign(layer), x.detach(), layer.router.weight
        (moe(tokens).sum() + moe(tokens).sum()).backward()
        both, weight.grad = weight.grad, None
        moe(tokens).sum().backward()
        assert_close(both, 2 * weight.grad)

    on_every_rank(Example([20]), work)


# An exception on one rank


TWO = Example([20, 16], experts=4)


def on_ranks(body, **options):
    def work(comm):
        return body(Balancer._with_settings(comm, experts=TWO.experts, **options))

    return LocalGroup(TWO.ranks).run(work)


class Failure(Exception):
    pass


class Raising:
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
