"""Row capacity: memory follows the rows, and grows when a plan needs more."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import shared_pool
from test_mapped import assert_as_on_host, mapped_balancer, memory_of, one_pass, single, small_tiles
from torch.autograd.graph import saved_tensors_hooks

import ultraep
from ultraep import BalanceConfig, Topology
from ultraep.backends.triton.device import interpreted

only_interpreted = pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")


# With a slot for every home expert, no plan exceeds the mean (docs/plan.md).


@st.composite
def proven(draw):
    """Draw loads, and a topology with at least as many slots as any rank has home experts."""
    ranks, experts = draw(st.integers(1, 8)), draw(st.integers(1, 24))
    homes = draw(st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts))
    most = int(np.bincount(homes).max())
    slots = draw(st.integers(most, min(experts, most + 2)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    liked = np.exp(rng.normal(0, draw(st.sampled_from([0.0, 1.0, 4.0, 8.0])), experts))
    scale = draw(st.sampled_from([0.1, 1, 30, 10**5])) / liked.mean()
    loads = rng.poisson(liked * scale, (ranks, experts))
    return loads, Topology(ranks=ranks, experts=experts, slots=slots, homes=homes)


@given(proven())
def test_with_as_many_slots_as_homes_no_rank_exceeds_the_mean(problem):
    loads, topology = problem
    plan = ultraep.plan(loads, topology, BalanceConfig(objective="balance"))
    assert plan.rank_loads.max() == -(-loads.sum() // topology.ranks)


# Capacity of mapped memory.


def learn(rank, group, example):
    """Return the bytes that autograd saves, and the rows of the memory, of two routings."""
    with small_tiles():
        balancer = mapped_balancer(example, group, policy="none", capacity="auto")
        layer, lengths, rooms = example.layer(balancer), [], []
        for ids in (example.ids[rank], torch.zeros_like(example.ids[rank])):
            layer.router.ids = ids
            saved = []
            with saved_tensors_hooks(partial(note, saved), same):
                layer(example.inputs[rank])
            lengths.append(set(saved))
            rooms.append(memory_of(balancer).rows)
        balancer.check()
        return lengths, rooms


def note(lengths, tensor):
    lengths += tensor.shape[:1]
    return tensor


def same(tensor):
    return tensor


@only_interpreted
def test_memory_follows_the_rows():
    """Without replicas, rank 0 serves its own 12 rows, then all 24; a quarter is spare."""
    even = torch.arange(12).reshape(6, 2) % 8
    example = single([6, 6], ids=[even, even])
    results = shared_pool().run(2, learn, example)
    for rank, (lengths, rooms) in enumerate(results):
        served = [int(((even % 8) // 4 == rank).sum()) * 2, 24 if rank == 0 else 0]
        assert rooms == [16 + 4, 24 + 6]
        for rows, saved in zip(served, lengths, strict=True):
            assert rows in saved
            assert not saved & {20, 30}  # the capacity of the memory


@only_interpreted
@pytest.mark.parametrize("policy", ["none", "registered"])
@pytest.mark.filterwarnings("ignore::ultraep.NothingToBalance")
def test_memory_grows_in_the_first_microbatch_that_does_not_fit(policy):
    """Three ranks send all rows to one rank."""
    example = single([6] * 3, experts=6, ids=[torch.zeros(6, 2, dtype=torch.int64)] * 3)
    assert_as_on_host(one_pass, example, policy=policy, slots=0, capacity="auto")
