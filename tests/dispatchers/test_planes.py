"""Dispatchers on both data planes, with real processes: they move rows, the plane does the rest."""

import sys

import pytest
import torch
from dense import Example, assert_close, gradients_of, on_every_rank
from ranks import PATIENCE, shared_pool
from shared_peers import SharedPeers
from stand_ins import library
from test_dispatchers import NAMES, dispatcher_of

from ultraep import Balancer
from ultraep.backends.triton.device import interpreted
from ultraep.dispatchers import LibraryRows, RawDispatcher
from ultraep.runtime.connect import connect

IDS = [torch.tensor([[0, 1], [0, -1], [1, 0], [-1, -1], [0, 5], [0, 4], [0, 1]]), torch.zeros(0, 2)]
EXAMPLE = Example([7, 0], dtype=torch.float32, bias=True, ids=[ids.long() for ids in IDS])


class Modules:
    """Installs modules in this process; the stand-ins stay, as processes are used again."""

    @staticmethod
    def setitem(modules, name, module):
        modules[name] = module


def on_plane(rank, group, plane, name):
    """Two passes, and the regions of rows."""
    library(Modules, "deep_ep", "2.1.0")
    try:
        return two_passes(rank, group, plane, name)
    finally:
        del sys.modules["deep_ep"]


def two_passes(rank, group, plane, name):
    comm = connect(group, timeout=PATIENCE)
    peers = {"peers": SharedPeers(group)} if plane == "mapped" else {}
    balancer = Balancer._with_settings(
        group,
        experts=EXAMPLE.experts,
        slots=2,
        data_plane=plane,
        timeout=PATIENCE,
        dispatcher=None if name is None else dispatcher_of(name)(comm),
        **peers,
    )
    layer = EXAMPLE.layer(balancer)
    x = EXAMPLE.inputs[rank].clone().requires_grad_()
    passed = passes(layer, x, EXAMPLE.gradients[rank])
    balancer.check()
    assert layer.last_plan.to_host().num_replicas > 0
    regions = set()
    if plane == "mapped":
        regions = set(balancer.plane("cpu").memory._regions)
    balancer.close()
    comm.close()
    return passed, regions


def passes(layer, x, gradient):
    """Two passes; the second microbatch begins before backward."""
    ys = [layer(x), layer(2 * x)]
    sum(ys).backward(gradient)
    return {"y": ys[0].detach(), **gradients_of(layer, x)}


@pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES[1:])]
)
@pytest.mark.parametrize("plane", ["mapped", "messages"])
def test_processes(plane, name):
    """The mapped plane allocates no memory for rows."""
    results = shared_pool().run(EXAMPLE.ranks, on_plane, plane, name)
    expected = on_every_rank(EXAMPLE, passes, slots=2)  # by messages
    for (own, regions), others in zip(results, expected, strict=True):
        assert regions.isdisjoint({"values", "served"})
        for key, tensor in others.items():
            assert_close(own[key], tensor, key, 1e-5)


# Rows of one rank on a GPU


CUDA = torch.device("cuda")


class SortedRows(LibraryRows):
    """Sorts rows by slot; counts stay on the device."""

    def __init__(self, routes):
        self.shape, slots = routes.slots.shape, routes.slots.flatten()
        self.order = slots.argsort(stable=True)[(slots < 0).sum() :]  # without padding
        self.counts = torch.bincount(slots[self.order], minlength=routes.slots_per_rank)

    def to_slots(self, values, scalars):
        rows = values[self.order // self.shape[1]]
        return rows, None if scalars is None else scalars.flatten()[self.order]

    def to_tokens(self, rows, scalars):
        sums = rows.new_zeros(self.shape[0], rows.shape[1])
        sums.index_add_(0, self.order // self.shape[1], rows)
        if scalars is None:
            return sums, None
        back = scalars.new_zeros(self.shape).flatten().index_copy_(0, self.order, scalars)
        return sums, back.view(self.shape)


class Raw(RawDispatcher):
    def begin(self, routes):
        return SortedRows(routes)


def one_pass(plane, dispatcher, example):
    """Output and gradients of the second of two steps, and the regions for rows."""
    options = {"data_plane": plane, "dispatcher": dispatcher}
    balancer = Balancer._with_settings("alone", experts=example.experts, slots=1, **options)
    layer = example.layer(balancer, device=CUDA)
    x = example.inputs[0].to(CUDA, copy=True).requires_grad_()
    layer(x)
    y = layer(x)
    y.backward(example.gradients[0].to(y))
    balancer.check()
    names = set()
    if plane == "mapped":
        names = set(balancer.plane(CUDA).memory._regions)
    balancer.close()
    return {"y": y.detach(), **gradients_of(layer, x)}, names & {"values", "served"}


@pytest.mark.gpu
@pytest.mark.parametrize("plane", ["mapped", "messages"])
def test_equal_to_the_data_plane(plane):
    example = Example([100], hidden=64, ffn=48, dtype=torch.float32)
    actual, rows = one_pass(plane, Raw(), example)
    expected, _ = one_pass(plane, None, example)
    assert not rows
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, name, 1e-5)
