"""Steps whose routes are known before: the same plans and gradients, with replicas sent ahead."""

from functools import partial

import pytest
import torch
from ranks import TRANSPORTS, everywhere, shared_pool
from shared_peers import SharedPeers
from torch import nn
from torch.utils.checkpoint import checkpoint

from ultraep import (
    BalanceConfig,
    BalancedMoE,
    Balancer,
    CommunicationError,
    ConfigError,
    LoadError,
    LocalGroup,
)
from ultraep.backends.triton.device import interpreted
from ultraep.routing import Routing
from ultraep.runtime.local import LocalCommunicator

RANKS, LAYERS, TOKENS, EXPERTS, HIDDEN = 2, 4, 24, 6, 8
BALANCE = BalanceConfig(objective="balance")


class Given(nn.Module):
    """A router whose choices are given."""

    ids = torch.empty(0)

    def forward(self, tokens):
        gates = tokens[:, : self.ids.shape[1]].sigmoid() + 0.5
        return Routing(self.ids, gates)


def drawn_routes(rank, seed, tokens=TOKENS, layers=LAYERS):
    """Return `[T, 2]` ids of every layer; the hot expert moves from layer to layer."""
    draw = torch.Generator().manual_seed(100 * seed + rank)
    routes = torch.randint(EXPERTS, (layers, tokens, 2), generator=draw)
    for layer, ids in enumerate(routes):
        ids[: 2 * tokens // 3, 0] = (layer + seed) % EXPERTS
        ids[-1, 1] = -1
    return list(routes)


class Model:
    """Some balanced layers of one rank, one after the other."""

    def __init__(self, balancer, *, layers=LAYERS, checkpointed=False, **options):
        self.balancer, self.checkpointed = balancer, checkpointed
        self.layers = [
            BalancedMoE.swiglu(
                HIDDEN, 16, EXPERTS, 2, balancer=balancer, seed=3 * n, dtype=torch.float64, **options
            )
            for n in range(layers)
        ]
        for layer in self.layers:
            layer.router = Given()

    def forward(self, routes, seed=0):
        rank = self.balancer.rank
        draw = torch.Generator().manual_seed(1000 + 10 * seed + rank)
        x = torch.randn(len(routes[0]), HIDDEN, generator=draw, dtype=torch.float64)
        x = self.x = x.requires_grad_()
        for layer, ids in zip(self.layers, routes, strict=True):
            layer.router.ids = ids
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x))
        return x

    def gradients(self):
        gradients = {"x": self.x.grad}
        for number, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                gradients[f"{number}.{name}"] = parameter.grad.clone()
                parameter.grad = None
        return gradients

    def step(self, routes, seed=0):
        y = self.forward(routes, seed)
        y.square().sum().backward()
        return {"y": y.detach(), **self.gradients()}

    def replicas(self):
        return [layer.last_plan.to_host().num_replicas for layer in self.layers]


def steps(comm, foresee, *, peers=None, checkpointed=False, **options):
    """Return outputs and gradients of three steps, and the replicas that were sent."""
    options = {"in_flight": 2, "config": BALANCE, "experts": EXPERTS} | options
    plane = {"communicator": comm} if peers is None else {"peers": peers, "data_plane": "mapped"}
    if peers is not None:
        plane |= {"capacity": 4 * RANKS * TOKENS}
    balancer = Balancer(comm if peers is not None else None, **plane, **options)
    model, results = Model(balancer, checkpointed=checkpointed), []
    for seed in range(3):
        routes = drawn_routes(balancer.rank, seed)
        if foresee:
            assert balancer.foresee(routes) == (seed > 0)  # the first step allocates
        results.append(model.step(routes, seed))
        assert sum(model.replicas()) > 0
    balancer.check()
    stats = balancer.stats()
    balancer.close() if peers is not None else None
    return results, stats["weights_copies_sent"], stats["microbatches"]


def assert_equal_steps(actual, expected):
    for own, other in zip(actual, expected, strict=True):
        for step, wanted in zip(own[0], other[0], strict=True):
            assert step.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert torch.equal(step[name], tensor), name


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gradients_are_the_same_bit_for_bit(transport):
    foreseen = everywhere(transport, RANKS, partial(steps, foresee=True))
    plain = everywhere(transport, RANKS, partial(steps, foresee=False))
    assert_equal_steps(foreseen, plain)
    assert [own[1:] for own in foreseen] == [own[1:] for own in plain]  # no replica is sent twice


@pytest.mark.parametrize("options", [{"checkpointed": True}, {"in_flight": 3}, {"slots": 2}])
def test_recompute_and_more_buffers(options):
    foreseen = LocalGroup(RANKS).run(partial(steps, foresee=True, **options))
    assert_equal_steps(foreseen, LocalGroup(RANKS).run(partial(steps, foresee=False, **options)))


def on_mapped(_rank, group, foresee, options):
    return steps(group, foresee, peers=SharedPeers(group), **options)


@pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
@pytest.mark.parametrize("options", [{}, {"checkpointed": True}])
def test_gradients_on_the_mapped_plane(options):
    foreseen, plain = (
        shared_pool().run(RANKS, on_mapped, foresee, options) for foresee in (True, False)
    )
    assert_equal_steps(foreseen, plain)
