"""A dispatcher of another library sends rows to slots instead of experts."""

from itertools import pairwise

import pytest
import torch
from dense import assert_same_tensors, gradients_of, network, on_every_rank
from test_seam import EXAMPLE, passes

from ultraep import serve
from ultraep.dispatch import Arrivals
from ultraep.microbatch import Layer

pytestmark = pytest.mark.usefixtures("one_thread")


class Permuting:
    """Moves rows to physical experts and back, like DeepEP, which has no replicas.

    first: first physical expert of every rank, and the end.
    """

    def __init__(self, comm, first):
        self.comm, self.first = comm, torch.tensor(first.tolist())

    def dispatch(self, tokens, experts_TK, gates_TK):
        """Return rows and gates by physical expert, their counts, and arguments for `combine`."""
        flat = experts_TK.flatten()
        order = flat.argsort(stable=True)[(flat < 0).sum() :]  # without padding
        rank_of = torch.bucketize(flat[order], self.first[1:], right=True)
        sent = torch.bincount(rank_of, minlength=self.comm.size)
        received = self.comm.all_gather(sent)[:, self.comm.rank]
        there = Transfer(self.comm, sent.tolist(), received.tolist())
        arrived = there.move(flat[order]) - self.first[self.comm.rank]
        sort = arrived.argsort(stable=True)
        rows = Moved.apply(tokens[order // experts_TK.shape[1]], there)[sort]
        gates = Moved.apply(gates_TK.flatten()[order], there)[sort]
        own = int(self.first[self.comm.rank + 1] - self.first[self.comm.rank])
        counts = torch.bincount(arrived, minlength=own).tolist()
        return rows, gates, counts, (there, sort, order, experts_TK.shape)

    def combine(self, outputs, state):
        """Sum the outputs of each token."""
        there, sort, order, (tokens, choices) = state
        back = Moved.apply(outputs[sort.argsort()], there.reversed())
        sums = torch.zeros(tokens, outputs.shape[1], dtype=outputs.dtype)
        return sums.index_add(0, order // choices, back)


class Transfer:
    """An all-to-all with these row counts per rank."""

    def __init__(self, comm, sent, received):
        self.comm, self.sent, self.received = comm, sent, received

    def move(self, rows):
        return self.comm.all_to_all(rows.contiguous(), self.sent, self.received)

    def reversed(self):
        return Transfer(self.comm, self.received, self.sent)


class Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, transfer):
        ctx.transfer = transfer
        return transfer.move(rows)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.transfer.reversed().move(gradient), None


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
