"""Rows travel to slots and back; each direction is the gradient of the other."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cases import routings
from dense import Example
from hypothesis import given, settings
from microbatches import planned
from torch.autograd.graph import saved_tensors_hooks

from ultraep import Balancer, LocalGroup
from ultraep.arrays import PADDING
from ultraep.dispatch import combine, dispatch
from ultraep.passes import Passes
from ultraep.reroute import reroute
from ultraep.runtime.connect import connect
from ultraep.runtime.messages.plane import RowMessages

pytestmark = pytest.mark.usefixtures("one_thread")


def on_ranks(routing, work):
    """Return the results of `work(exchange, rank)` on every rank."""
    ids, plan = routing

    def on_rank(comm):
        shared = Mock(comm=comm)
        routes = reroute(ids[comm.rank], plan, comm.rank)
        return work(RowMessages(routes, shared, Passes(layer=0, step=1)), comm.rank)

    return LocalGroup(len(ids)).run(on_rank)


@settings(max_examples=60)
@given(routings())
def test_every_slot_gets_its_rows_source_by_source(routing):
    def work(exchange, rank):
        routes = exchange.routes
        tokens = torch.arange(routes.shape[0])
        choices = torch.arange(routes.num_rows).reshape(routes.shape)
        values = torch.stack([torch.full_like(tokens, rank), tokens], dim=1)
        rows, scalars = exchange.to_slots(values, choices)
        return routes, exchange.begins(), torch.cat([rows, scalars[:, None]], dim=1)

    results = on_ranks(routing, work)
    slot = 0
    for _, begins, arrived in results:
        for rows in arrived.split(np.diff(begins).tolist()):
            expected = []
            for source, (routes, *_) in enumerate(results):
                slots = routes.slots.reshape(-1)[routes.order]
                for choice in routes.order[slots == slot].tolist():
                    expected.append([source, choice // routes.shape[-1], choice])
            assert rows.tolist() == expected
            slot += 1


class Counting:
    """A communicator that records the shapes that it sends."""

    def __init__(self, comm):
        self._comm, self.shapes = comm, []
        self.rank, self.size = comm.rank, comm.size

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def all_to_all(self, rows, *counts):
        self.shapes.append(list(rows.shape))
        return self._comm.all_to_all(rows, *counts)


def exchange_of_one(ids, comm=None):
    balancer = Balancer(comm or connect(None), experts=4)
    return planned(balancer, ids, policy="none")[0].reroute()


IDS = torch.tensor([[0, 1], [2, PADDING], [3, 3], [1, 0], [PADDING, PADDING]])


def test_dispatch_and_combine_save_no_rows():
    saved = []
    exchange = exchange_of_one(IDS)
    tokens, weights = torch.randn(5, 8, requires_grad=True), torch.rand(5, 2, requires_grad=True)
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        arrivals = dispatch(tokens, weights, exchange)
        combine(arrivals.rows, exchange).sum().backward()
    assert [tensor.numel() for tensor in saved] == [1, 1]  # a label of the exchange each


def test_a_layer_saves_inputs_and_activations_but_no_outputs():
    example = Example([30], top_k=5, hidden=16, ffn=12)
    layer = example.layer(Balancer("alone", experts=8))
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(example.inputs[0].clone().requires_grad_())
    large = [list(tensor.shape) for tensor in saved if len(tensor) == 30 * 5 and tensor.ndim > 1]
    assert sorted(large) == [[150, 16], [150, 24]]


def test_gradients_of_frozen_gates_are_not_sent():
    def work(comm):
        counting = Counting(comm)
        exchange = exchange_of_one(IDS, counting)
        tokens = torch.randn(5, 8, requires_grad=True)
        arrivals = dispatch(tokens, torch.rand(5, 2), exchange)
        assert arrivals.rows.requires_grad
        assert not arrivals.gates.requires_grad
        combine(arrivals.rows * arrivals.gates[:, None], exchange).sum().backward()
        return counting.shapes

    first, second = LocalGroup(2).run(work)
    # rows, gates, outputs, gradients of outputs, gradients of rows
    assert first == [[7, 8], [7], [8, 8], [7, 8], [8, 8]]
    assert second == [[7, 8], [7], [6, 8], [7, 8], [6, 8]]
