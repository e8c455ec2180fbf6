"""Every routed row gets the slot that the plan assigns to it, with every backend."""

import itertools
import math

import numpy as np
import pytest
import torch
from cases import draw_ids, plan_of, routings
from hypothesis import given, settings

from ultraep import BalanceConfig, LoadError, Topology
from ultraep.arrays import PADDING
from ultraep.reroute import reroute


@settings(max_examples=200)
@given(routings())
def test_the_cpu_backend_gives_the_routes_of_the_reference(routing):
    ids, plan = routing
    for rank, own in enumerate(ids):
        expected = reroute(own, plan, rank, backend="reference")
        routes = reroute(own, plan, rank, backend="cpu")
        assert torch.equal(routes.slots, expected.slots)
        assert torch.equal(routes.order, expected.order)
        assert routes.slots.dtype == routes.order.dtype == torch.int64
        assert routes.send_counts == expected.send_counts
        np.testing.assert_array_equal(routes.receive_counts, expected.receive_counts)


@settings(max_examples=100)
@given(routings())
def test_rows_are_sent_by_slot_then_by_position(routing):
    ids, plan = routing
    for rank, own in enumerate(ids):
        routes = reroute(own, plan, rank)
        served = rows_by_slot(own, plan, rank)
        slots = routes.slots.reshape(-1)
        for slot, rows in enumerate(served):
            assert (slots[rows] == slot).all()
        assert (slots[own.reshape(-1) == PADDING] == PADDING).all()
        assert routes.has_padding == bool((own == PADDING).any())
        assert routes.order.tolist() == list(itertools.chain(*served))
        assert routes.rows_of_slot.tolist() == [len(rows) for rows in served]


def rows_by_slot(own, plan, rank):
    """Return the rows of every slot: the permuted rows of each expert, split by quota."""
    topology, ids = plan.topology, own.reshape(-1).tolist()
    served = [[] for _ in range(topology.first_slot_of_rank[-1])]
    for expert, home in enumerate(topology.home_slot_of_expert):
        rows = [row for row, chosen in enumerate(ids) if chosen == expert]
        replicas = np.flatnonzero(plan.replicas[:, 0] == expert)
        counts = plan.split[replicas, rank].tolist()
        line = permuted(rows) if sum(counts) else rows
        spare = [topology.spare_slot(*plan.replicas[replica, 1:]) for replica in replicas]
        for slot, count in zip([home, *spare], [len(rows) - sum(counts), *counts], strict=True):
            served[slot], line = line[:count], line[count:]
        assert not line
    return served


def permuted(rows):
    """Permute rows: each is placed a golden section after the previous one, modulo the length."""
    length = len(rows)
    starts = itertools.count(max(1, length * 618 // 1000))
    step = next(step for step in starts if math.gcd(step, length) == 1)
    line = [None] * length
    for number, row in enumerate(rows):
        line[number * step % length] = row
    return line


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("tokens", [32, 64, 100, 128, 400, 1000, 4096])
def test_neighbouring_tokens_spread_over_replicas(tokens, backend):
    """With locality off and one source, home and three replicas serve a quarter each."""
    topology = Topology(ranks=4, experts=4, slots=1)
    ids = [torch.zeros(tokens, 1, dtype=torch.int64), *[torch.zeros(0, 1, dtype=torch.int64)] * 3]
    plan = plan_of(ids, topology, BalanceConfig(locality=False))
    assert plan.quotas.tolist() == [tokens // 4] * 3
    slots = reroute(ids[0], plan, 0, backend=backend).slots[:, 0]
    assert slots.bincount()[slots.unique()].tolist() == [tokens // 4] * 4
    for begin in range(0, tokens - tokens // 4 + 1, max(1, tokens // 40)):
        window = slots[begin : begin + tokens // 4]
        assert len(window.unique()) == 4, begin


def test_an_example_by_hand():
    topology = Topology(ranks=2, experts=2, slots=1)  # slots: 0 home, 1 spare; 2 home, 3 spare
    ids = [torch.tensor([[0], [0], [0], [1]]), torch.tensor([[0], [0], [0], [0], [0]])]
    plan = plan_of(ids, topology)
    assert plan.replicas.tolist() == [[0, 1, 0]]
    assert plan.split.tolist() == [[0, 4]]  # 9 rows: rank 0 serves 5, rank 1 serves 4
    near, far = (reroute(own, plan, rank) for rank, own in enumerate(ids))
    assert near.slots.tolist() == [[0], [0], [0], [2]]
    assert near.order.tolist() == [0, 1, 2, 3]
    assert near.send_counts == [3, 1]
    assert near.receive_counts.tolist() == [[3, 0], [1, 0]]
    assert far.slots.tolist() == [[0], [3], [3], [3], [3]]
    assert far.order.tolist() == [0, 2, 4, 1, 3]  # their positions: 0 3 1 4 2
    assert far.send_counts == [1, 4]
    assert far.receive_counts.tolist() == [[1, 0], [0, 4]]
    assert far.shape[-1] == 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_ids_of_any_integer_type_that_are_a_view(dtype):
    topology = Topology(ranks=2, experts=8, slots=2)
    rng = np.random.default_rng(0)
    ids = [draw_ids(rng, 50, 4, topology, 2.0)[:, ::2] for _ in range(2)]
    plan = plan_of(ids, topology)
    expected = reroute(ids[1].contiguous(), plan, 1).slots
    assert torch.equal(reroute(ids[1].to(dtype), plan, 1).slots, expected)


@pytest.mark.parametrize(
    "ids",
    [
        [[0], [0], [1], [1], [1]],  # other experts than the plan counted
        [[0], [0], [0]],  # fewer rows
        [[0], [0], [0], [0], [4]],  # an expert out of range
        [[0], [0], [0], [0], [-1]],  # padding where a row was counted
        [[0], [0], [0], [0], [0], [-2]],
    ],
    ids=str,
)
def test_ids_that_do_not_fit_the_plan_are_refused(ids):
    """Compiled backends do not check, and would write out of bounds."""
    topology = Topology(ranks=2, experts=4, slots=1)
    counted = [torch.zeros(5, 1, dtype=torch.int64)] * 2
    plan = plan_of(counted, topology)
    assert plan.num_replicas > 0
    with pytest.raises(LoadError):
        reroute(torch.tensor(ids), plan, 1, backend="reference")
