"""Backward uses the tensors and slots of its own forward pass, and releases the slots."""

import pytest
import torch
from dense import Example, assert_close, network, with_network
from microbatches import planned

from ultraep import Balancer, LocalGroup, UltraEPError, serve
from ultraep.dispatch import Arrivals

pytestmark = pytest.mark.usefixtures("one_thread")

TWO = Example([20, 16], experts=4)


def on_ranks(body, **options):
    def work(comm):
        return body(Balancer._with_settings(comm, experts=TWO.experts, **options))

    return LocalGroup(TWO.ranks).run(work)


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
