"""A dispatcher of others, which only permutes rows: it is told slots in place of experts."""

from itertools import pairwise

import pytest
import torch
from dense import Example, gradients_of, network
from test_seam import assert_alike, on_ranks, passes

from ultraep import serve
from ultraep.dispatch import Arrivals
from ultraep.microbatch import Layer

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLE = Example([30, 20, 25], experts=9, bias=True)


class Permuting:
    """Moves rows to physical experts and back, as DeepEP does; it knows nothing of copies.

    first: of the physical experts of every rank, counted over all ranks, and one past the last.
    """

    def __init__(self, comm, first):
        self.comm, self.first = comm, torch.tensor(first.tolist())

    def dispatch(self, tokens, experts_TK, gates_TK):
        """Rows and gates by physical expert of this rank, how many of each, and the way back."""
        flat = experts_TK.flatten()
        order = flat.argsort(stable=True)[(flat < 0).sum() :]  # without those that chose nothing
        rank_of = torch.bucketize(flat[order], self.first[1:], right=True)
        sent = torch.bincount(rank_of, minlength=self.comm.size)
        received = self.comm.all_gather(sent)[:, self.comm.rank]
        there = Way(self.comm, sent.tolist(), received.tolist())
        arrived = there.move(flat[order]) - self.first[self.comm.rank]
        sort = arrived.argsort(stable=True)
        rows = Moved.apply(tokens[order // experts_TK.shape[1]], there)[sort]
        gates = Moved.apply(gates_TK.flatten()[order], there)[sort]
        own = int(self.first[self.comm.rank + 1] - self.first[self.comm.rank])
        counts = torch.bincount(arrived, minlength=own).tolist()
        return rows, gates, counts, (there, sort, order, experts_TK.shape)

    def combine(self, outputs, way_back):
        """Sums of the outputs at their tokens."""
        there, sort, order, (tokens, choices) = way_back
        back = Moved.apply(outputs[sort.argsort()], there.turned())
        sums = torch.zeros(tokens, outputs.shape[1], dtype=outputs.dtype)
        return sums.index_add(0, order // choices, back)


class Way:
    """So many rows to every rank, and from every rank."""

    def __init__(self, comm, sent, received):
        self.comm, self.sent, self.received = comm, sent, received

    def move(self, rows):
        return self.comm.all_to_all(rows.contiguous(), self.sent, self.received)

    def turned(self):
        return Way(self.comm, self.received, self.sent)


class Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, way):
        ctx.way = way
        return way.move(rows)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.way.turned().move(gradient), None


class Foreign:
    """A layer with a router and a dispatcher of its own: plan, replicate and reroute are ours."""

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
    """Outputs and all gradients, those of copies through the loan, are those of our layer."""
    ours = on_ranks(EXAMPLE, passes(lambda layer: layer), slots=2)
    foreign = on_ranks(EXAMPLE, passes(Foreign), slots=2)
    assert_alike(foreign, ours)


def test_microbatches_in_flight():
    """Two forward passes, then their backward passes in the order of a pipeline."""

    def both(layer, rank, example):
        moe = Foreign(layer)
        xs = [example.inputs[rank].clone().requires_grad_() for _ in range(2)]
        ys = [moe(x if index == 0 else x.flip(0)) for index, x in enumerate(xs)]
        for y in ys:
            y.backward(example.gradients[rank])
        return {"y0": ys[0].detach(), "x1": xs[1].grad, **gradients_of(layer, xs[0])}

    balanced, plain = (on_ranks(EXAMPLE, both, policy=p) for p in ("ultraep", "none"))
    assert_alike(balanced, plain)
