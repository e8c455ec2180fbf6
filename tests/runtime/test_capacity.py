"""Row capacity: static where the proof holds, refused elsewhere; "auto" learns and grows."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from microbatches import planned
from ranks import shared_pool
from test_mapped import assert_as_on_host, mapped_balancer, memory_of, one_pass, single, small_tiles
from torch.autograd.graph import saved_tensors_hooks

import ultraep
from ultraep import BalanceConfig, Balancer, ConfigError, LoadError, LocalGroup, Rates, Topology
from ultraep.backends.triton.device import interpreted
from ultraep.runtime.capacity import Capacity

only_interpreted = pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
EXACT = BalanceConfig(objective="balance")


def hot_ids(tokens, experts=8):
    """Route all but a few rows to the first expert."""
    rng = np.random.default_rng(tokens)
    return torch.from_numpy(rng.choice([0, 0, 0, experts - 1], (tokens, 2)))


# The proof, checked with random loads.


def drawn_loads(draw, topology):
    """Draw flat or skewed loads, few or many rows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    liked = np.exp(rng.normal(0, draw(st.sampled_from([0.0, 1.0, 4.0, 8.0])), topology.experts))
    scale = draw(st.sampled_from([0.1, 1, 30, 10**5])) / liked.mean()
    return rng.poisson(liked * scale, (topology.ranks, topology.experts)), topology


@st.composite
def proven(draw):
    """Draw loads, and a topology with at least as many slots as any rank has home experts."""
    ranks, experts = draw(st.integers(1, 8)), draw(st.integers(1, 24))
    homes = draw(st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts))
    most = int(np.bincount(homes).max())
    slots = draw(st.integers(most, min(experts, most + 2)))
    return drawn_loads(draw, Topology(ranks=ranks, experts=experts, slots=slots, homes=homes))


@st.composite
def proven_in_domains(draw):
    """Draw loads of several domains, with a slot for every home expert of a rank."""
    domains, size, homes = (draw(st.integers(least, 4)) for least in (2, 1, 1))
    ranks = domains * size
    topology = Topology(ranks=ranks, experts=ranks * homes, slots=homes, domain=size)
    return drawn_loads(draw, topology)


@given(proven(), st.integers(0, 2**32 - 1))
def test_with_as_many_slots_as_homes_no_rank_exceeds_the_mean(problem, seed):
    """Padding and short microbatches only reduce the rows."""
    loads, topology = problem
    capacity = Capacity("static", topology, EXACT)
    assert capacity.proven
    plan = ultraep.plan(loads, topology, EXACT)
    assert plan.rank_loads.max() == -(-loads.sum() // topology.ranks)
    capacity.check(plan)
    rows = max(1, int(loads.sum(axis=1).max()))
    assert capacity.rows_for(rows) == rows
    kept = np.random.default_rng(seed).binomial(loads, 0.7)
    assert ultraep.plan(kept, topology, EXACT).rank_loads.max() <= rows


@given(proven_in_domains())
def test_no_rank_exceeds_the_mean_of_the_busiest_domain(problem):
    loads, topology = problem
    capacity, plan = Capacity("static", topology, EXACT), ultraep.plan(loads, topology, EXACT)
    of_domains = loads.sum(axis=0).reshape(topology.num_domains, -1).sum(axis=1)
    assert plan.rank_loads.max() <= -(-of_domains.max() // topology.domain_size)
    capacity.check(plan)
    rows = max(1, int(loads.sum(axis=1).max()))
    assert plan.rank_loads.max() <= capacity.rows_for(rows) == rows * topology.num_domains


# Settings that break the proof.


BROKEN = {
    "slots": ({"slots": 3}, "3 slots, it needs 4"),
    "uneven homes": ({"slots": 4, "experts": [0, 0, 0, 0, 0, 1, 1, 1]}, "4 slots, it needs 5"),
    "tolerance": ({"config": BalanceConfig(tolerance=0.01)}, "tolerance=0.01, it needs 0"),
    "floor": (
        {"config": BalanceConfig(min_tokens_per_replica=64)},
        "min_tokens_per_replica=64, it needs 1",
    ),
    "copies": (
        {"slots": 4, "config": BalanceConfig(objective="balance", max_replicas=7)},
        "max_replicas=7, it needs 8",
    ),
    "time": (
        {"config": BalanceConfig(objective="time", rates=Rates(row=1))},
        "objective='time', it needs 'balance'",
    ),
    "policy": ({"policy": "registered"}, "policy='registered', it needs 'ultraep'"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.filterwarnings("ignore::ultraep.NothingToBalance")
def test_settings_that_break_the_proof_are_refused(name):
    options, words = BROKEN[name]

    def work(comm):
        with pytest.raises(ConfigError, match=f"capacity='static' is the mean, .*{words}"):
            Balancer._with_settings(comm, capacity="static", **{"experts": 8} | options)
        Balancer._with_settings(comm, capacity="auto", **{"experts": 8} | options)

    LocalGroup(2).run(work)


def test_another_policy_that_exceeds_a_static_capacity_is_refused():
    def work(comm):
        balancer = Balancer(comm, experts=8, slots=4, capacity="static")
        ids = torch.zeros(5, 2, dtype=torch.int64)
        with pytest.raises(LoadError, match=r"'none' gives 20 rows to rank 0.*the mean of 10"):
            planned(balancer, ids, policy="none")
        assert planned(balancer, ids)[1].rank_loads.tolist() == [10, 10]

    LocalGroup(2).run(work)


# Capacity of mapped memory.


@only_interpreted
def test_static_memory_holds_exactly_the_rows_of_a_rank():
    actual = assert_as_on_host(hold, hot_example(), slots=4, capacity="static")
    for own in actual:
        assert own["arrived"] == own["room"] == 9 * 2


def hot_example():
    return single([9, 9], ids=[hot_ids(9), hot_ids(9)])


def hold(balancer, example):
    """Run one pass; also return the rows that arrived and the row capacity."""
    passed = one_pass(balancer, example)
    plan = planned(balancer, example.ids[balancer.rank])[1].to_host()
    arrived, room = int(plan.rank_loads[balancer.rank]), 18
    if balancer.plane("cpu").name == "mapped":
        room = memory_of(balancer).rows
        assert int(memory_of(balancer).exchange.faults[1]) == arrived
    return passed | {"arrived": torch.tensor(arrived), "room": torch.tensor(room)}


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


def test_rows_of_auto_and_fixed_capacities():
    few, many = (Topology(ranks=4, experts=16, slots=slots) for slots in (1, 4))
    assert Capacity("auto", few, EXACT).rows_for(100) == 200
    assert Capacity("auto", many, EXACT).rows_for(100) == 100
    assert Capacity("auto", few, EXACT).rows_for(100, 160) == 160 + 40
    assert Capacity("static", many, EXACT).rows_for(100, 90) == 100
    assert Capacity(77, few, EXACT).rows_for(100, 500) == 77
