"""Rows of one rank through a dispatcher on a GPU, on both data planes."""

import pytest
import torch
from dense import Example, assert_close, gradients_of

from ultraep import Balancer
from ultraep.dispatchers import LibraryRows, RawDispatcher

pytestmark = pytest.mark.gpu
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


@pytest.mark.parametrize("plane", ["mapped", "messages"])
def test_equal_to_the_data_plane(plane):
    example = Example([100], hidden=64, ffn=48, dtype=torch.float32)
    actual, rows = one_pass(plane, Raw(), example)
    expected, _ = one_pass(plane, None, example)
    assert not rows
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, name, 1e-5)
