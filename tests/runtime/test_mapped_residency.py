"""Replicas that are still in their slots: the mapped plane sends the same bytes as messages.

Every scenario runs on both planes. Slots hold what the plan says, and bytes are sent as often.
"""

import numpy as np
import pytest
import torch
from microbatches import planned
from ranks import shared_pool
from test_mapped import mapped_balancer, single, small_tiles

from ultraep import Balancer, LocalGroup
from ultraep.backends.triton.device import interpreted
from ultraep.backends.triton.signals import AS_PROMISED, WeightVersion
from ultraep.runtime.mapped.plane import MappedMicrobatch

only_interpreted = pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
RANKS, EXPERTS = 3, 6
pytestmark = pytest.mark.slow


class Replicated:
    """A rank that fills its slots, checks them, and returns the bytes that it sent."""

    def __init__(self, balancer):
        self.balancer = balancer
        self.homes = balancer.topology.home_experts(balancer.rank).tolist()

    def weights(self, scale=1.0):
        return {"w": scale * torch.arange(1.0, 7.0)[self.homes, None].repeat(1, 5)}

    def ids(self, seed=0):
        rng = np.random.default_rng([seed, self.balancer.rank])
        return torch.from_numpy(rng.choice([0, 0, 0, seed % 3, 2, 5], (12, 1)))

    def step(self, bundle, *, layer=0, seed=0, scale=1.0):
        microbatch, plan = planned(self.balancer, self.ids(seed), bundle, layer=layer)
        made = plan.to_host()
        assert made.num_replicas
        nbytes = self.sent(0)
        copies = microbatch.replicate()
        with copies:
            self.look(made, copies, scale)
        nbytes = self.sent(nbytes)
        return copies, made, nbytes

    def look(self, plan, copies, scale):
        held = copies.tensors()["w"]
        for expert, host, slot in plan.replicas.tolist():
            if host == self.balancer.rank:
                assert held[slot].tolist() == [scale * (expert + 1)] * 5, (expert, slot)

    def sent(self, before):
        return self.balancer.stats()["weights_bytes_sent"] - before


def again(me):
    """Without a promise, every microbatch sends all replicas."""
    bundle = me.weights()
    return [me.step(bundle)[2] for _ in range(3)]


def promised(me):
    """Under a promise, send once; for another plan, only missing replicas; after it, all again."""
    bundle, actual = me.weights(), []
    with me.balancer.unchanged_weights():
        actual += [me.step(bundle, seed=seed)[2] for seed in (0, 0, 1, 1, 0)]
    return [*actual, me.step(bundle)[2]]


def one_promises(me):
    bundle = me.weights()
    if me.balancer.rank:
        return [me.step(bundle)[2] for _ in range(2)]
    with me.balancer.unchanged_weights():
        return [me.step(bundle)[2] for _ in range(2)]


def broken(me):
    """Writes that torch sees, other tensors, and `weights_changed` end the promise."""
    bundle = me.weights()
    with me.balancer.unchanged_weights():
        actual = [me.step(bundle)[2]]
        bundle["w"].mul_(2)
        actual.append(me.step(bundle, scale=2.0)[2])
        actual.append(me.step(me.weights(3.0), scale=3.0)[2])
        other = me.weights(4.0)
        actual.append(me.step(other, scale=4.0)[2])
        other["w"].numpy()[:] *= 2  # torch does not see it
        if me.balancer.rank == 0:
            me.balancer.weights_changed()
        else:
            other["w"].add_(0)
        actual.append(me.step(other, scale=8.0)[2])
    return actual


def layers(me):
    """Two layers take turns in one buffer; with two buffers, each reuses its own."""
    one, two = me.weights(), me.weights(2.0)
    with me.balancer.unchanged_weights():
        return [
            me.step(bundle, layer=layer, scale=1.0 + layer)[2]
            for layer, bundle in ((0, one), (1, two), (1, two), (0, one))
        ]


def there_and_back(me):
    """Run two layers forward, then backward in reverse; return the bytes sent in backward."""
    bundles = me.weights(), me.weights(2.0)
    with me.balancer.unchanged_weights():
        opened = [me.step(b, layer=n, scale=1.0 + n)[:2] for n, b in enumerate(bundles)]
        actual = []
        for scale, (copies, plan) in zip((2.0, 1.0), reversed(opened), strict=True):
            before = me.sent(0)
            with copies:
                me.look(plan, copies, scale)
            actual.append(me.sent(before))
        return actual


SCENARIOS = {
    "again": (again, {}),
    "promised": (promised, {}),
    "promised, in chains": (promised, {"relay": "chain"}),
    "one promises": (one_promises, {"relay": "direct"}),
    "broken": (broken, {}),
    "layers": (layers, {}),
    "layers with a buffer each": (layers, {"in_flight": 2}),
    "there and back": (there_and_back, {}),
    "there and back with a buffer each": (there_and_back, {"in_flight": 2}),
}


def replayed(me):
    """As in a graph, read the promise on the device when a kernel runs."""
    plane, bundle, actual = me.balancer.plane("cpu"), me.weights(), []

    def as_promised(*_):
        versions = torch.empty(RANKS, dtype=torch.int32)
        return WeightVersion(AS_PROMISED, plane.promised, versions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MappedMicrobatch, "_weights_promise", as_promised)
        for _ in range(2):
            with me.balancer.unchanged_weights():
                actual += [me.step(bundle)[2] for _ in range(2)]
                bundle["w"].mul_(2)  # not visible between replays, but
                me.balancer.weights_changed()
                actual += [me.step(bundle, scale=2.0)[2] for _ in range(2)]
            bundle["w"].div_(2)
        return [*actual, me.step(bundle)[2]]


def on_replays(rank, group):
    with small_tiles():
        balancer = mapped_balancer(single([12] * RANKS, experts=EXPERTS), group, **sizes({}))
        actual = replayed(Replicated(balancer))
        balancer.check()
        return actual


@only_interpreted
def test_replays_follow_the_promise_of_their_time():
    actual = shared_pool().run(RANKS, on_replays)
    first, *others = [sum(steps) for steps in zip(*actual, strict=True)]
    assert first > 0
    assert others == [0, first, 0, first, 0, first, 0, first]


def on_mapped(rank, group, name):
    work, options = SCENARIOS[name]
    with small_tiles():
        balancer = mapped_balancer(single([12] * RANKS, experts=EXPERTS), group, **sizes(options))
        actual = work(Replicated(balancer))
        balancer.check()
        return actual


def sizes(options):
    return {"slots": 1, "relay": "direct", "in_flight": 1} | options


@only_interpreted
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_bytes_sent_agree_with_messages(name):
    work, options = SCENARIOS[name]

    def on_messages(comm):
        return work(Replicated(Balancer._with_settings(comm, experts=EXPERTS, **sizes(options))))

    actual = shared_pool().run(RANKS, on_mapped, name)
    summed = [sum(steps) for steps in zip(*actual, strict=True)]
    expected = LocalGroup(RANKS).run(on_messages)
    assert summed == [sum(steps) for steps in zip(*expected, strict=True)]
    assert any(summed) == (name != "there and back with a buffer each")
