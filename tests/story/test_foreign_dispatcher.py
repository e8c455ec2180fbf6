"""A dispatcher of another library sends rows to slots instead of experts."""

from itertools import pairwise

import pytest
from dense import assert_same_tensors, gradients_of, network, on_every_rank
from permuting import Permuting
from test_extension_api import EXAMPLE, passes

from ultraep import serve
from ultraep.dispatch import Arrivals
from ultraep.microbatch import Layer

pytestmark = pytest.mark.usefixtures("one_thread")


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
