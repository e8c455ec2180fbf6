"""Dispatchers on both data planes, with real processes: they move rows, the plane does the rest."""

import sys

import pytest
import torch
from dense import Example, assert_close, gradients_of
from ranks import PATIENCE, shared_pool
from shared_peers import SharedPeers
from stand_ins import library
from test_dispatchers import NAMES, dispatcher_of

from ultraep import Balancer, LocalGroup
from ultraep.backends.triton.device import interpreted
from ultraep.runtime.connect import connect

pytestmark = pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")

IDS = [torch.tensor([[0, 1], [0, -1], [1, 0], [-1, -1], [0, 5], [0, 4], [0, 1]]), torch.zeros(0, 2)]
EXAMPLE = Example([7, 0], dtype=torch.float32, bias=True, ids=[ids.long() for ids in IDS])


class Modules:
    """Installs modules in this process; the stand-ins stay, as processes are used again."""

    @staticmethod
    def setitem(modules, name, module):
        modules[name] = module


def on_plane(rank, group, plane, name):
    """Two passes and their regions of rows; the second microbatch begins before backward."""
    library(Modules, "deep_ep", "2.1.0")
    library(Modules, "torch_stand_in", "2.15.0")
    try:
        return two_passes(rank, group, plane, name)
    finally:
        del sys.modules["deep_ep"], sys.modules["torch_stand_in"]


def two_passes(rank, group, plane, name):
    comm = connect(group, timeout=PATIENCE)
    peers = {"peers": SharedPeers(group)} if plane == "mapped" else {}
    balancer = Balancer._with_settings(
        group,
        experts=EXAMPLE.experts,
        slots=2,
        data_plane=plane,
        timeout=PATIENCE,
        dispatcher=None if name is None else dispatcher_of(name, slots_per_rank=6)(comm),
        **peers,
    )
    layer = EXAMPLE.layer(balancer)
    x = EXAMPLE.inputs[rank].clone().requires_grad_()
    balancer.prepare(EXAMPLE.ids[0], x, layer.experts.bundle)  # sizes of the largest rank
    ys = [layer(x), layer(2 * x)]
    sum(ys).backward(EXAMPLE.gradients[rank])
    balancer.check()
    assert layer.last_plan.to_host().num_replicas > 0
    regions = set()
    if plane == "mapped":
        workspaces = balancer.plane("cpu").workspaces.all
        regions = {key[0] for workspace in workspaces for key in workspace.memory._regions}
    balancer.close()
    comm.close()
    return {"y": ys[0].detach(), **gradients_of(layer, x)}, regions


def expected():
    """The rows of the messages plane, one thread for each rank."""

    def work(comm):
        balancer = Balancer(comm, experts=EXAMPLE.experts, slots=2)
        layer = EXAMPLE.layer(balancer)
        x = EXAMPLE.inputs[comm.rank].clone().requires_grad_()
        ys = [layer(x), layer(2 * x)]
        sum(ys).backward(EXAMPLE.gradients[comm.rank])
        return {"y": ys[0].detach(), **gradients_of(layer, x)}

    return LocalGroup(EXAMPLE.ranks).run(work)


@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES[1:])]
)
@pytest.mark.parametrize("plane", ["mapped", "messages"])
def test_processes(plane, name):
    """The mapped plane allocates no memory for rows."""
    results = shared_pool().run(EXAMPLE.ranks, on_plane, plane, name)
    for (own, regions), others in zip(results, expected(), strict=True):
        assert regions.isdisjoint({"values", "served"})
        for key, tensor in others.items():
            assert_close(own[key], tensor, key, 1e-5)
