"""Rows travel to slots and back; each direction is the gradient of the other."""

import pytest
import torch
from dense import Example
from microbatches import planned
from torch.autograd.graph import saved_tensors_hooks

from ultraep import Balancer, LocalGroup
from ultraep.arrays import PADDING
from ultraep.dispatch import combine, dispatch
from ultraep.runtime.connect import connect

pytestmark = pytest.mark.usefixtures("one_thread")


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
