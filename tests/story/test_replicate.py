"""Spare slots hold the bytes of the home weights, for every relay mode."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from cases import configs, problems, skewed_ids
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from microbatches import planned

import ultraep
from ultraep import Balancer, ConfigError, LocalGroup, Topology
from ultraep.bundle import Layout
from ultraep.hops import HOME, MODES, choose, hops

pytestmark = pytest.mark.usefixtures("one_thread")


modes = st.sampled_from(MODES)
chunks_of_a_chain = st.integers(1, 9)


@settings(max_examples=100)
@given(problems(), configs, modes, chunks_of_a_chain)
def test_every_replica_is_sent_once_by_a_rank_that_has_it(problem, config, mode, chunks):
    loads, topology = problem
    plan = ultraep.plan(loads, topology, config)
    route = hops(plan, mode, chunks=chunks)
    reached = [(hop.expert, hop.receiver, hop.slot) for hop in route]
    assert sorted(reached) == sorted(map(tuple, plan.replicas.tolist()))
    depth_at = {}
    for hop in route:  # in this order, every sender has the expert before it sends it
        if hop.sender_slot == HOME:
            assert hop.sender == topology.home_of_expert[hop.expert]
            assert hop.depth == 0
        else:
            assert depth_at[hop.expert, hop.sender, hop.sender_slot] == hop.depth - 1
        depth_at[hop.expert, hop.receiver, hop.slot] = hop.depth


@settings(max_examples=100)
@given(problems(), configs)
def test_routes_of_direct_and_chain(problem, config):
    """Direct: the home sends all. Chain: one send per rank and expert; busy ranks come last."""
    loads, topology = problem
    plan = ultraep.plan(loads, topology, config)
    assert all((hop.sender_slot, hop.depth) == (HOME, 0) for hop in hops(plan, "direct"))
    chain = hops(plan, "chain")
    sends = Counter((hop.expert, hop.sender) for hop in chain)
    assert max(sends.values(), default=0) <= 1
    assert max((hop.depth + 1 for hop in chain), default=0) == plan.max_fanout
    donors = set(topology.home_of_expert[plan.replicas[:, 0]].tolist())
    receivers = {}
    for hop in chain:
        receivers.setdefault(hop.expert, []).append(hop.receiver in donors)
    assert all(is_donor == sorted(is_donor) for is_donor in receivers.values())


def test_an_unknown_mode_is_refused():
    plan = ultraep.plan(np.zeros((2, 2), dtype=int), Topology(ranks=2, experts=2))
    with pytest.raises(ConfigError, match="relay must be one of direct, chain, auto, got 'ring'"):
        hops(plan, "ring")


@settings(max_examples=100)
@given(problems(), configs, chunks_of_a_chain)
def test_auto_is_the_mode_whose_busiest_rank_finishes_first(problem, config, chunks):
    loads, topology = problem
    plan = ultraep.plan(loads, topology, config)
    assume(plan.num_replicas > 0)
    homes = topology.home_of_expert[plan.replicas[:, 0]]
    directly = np.bincount(homes).max()  # transfers of whole experts
    in_chains = max(Counter(hop.sender for hop in hops(plan, "chain")).values())
    waits = Fraction(plan.max_fanout - 1, chunks)  # until the last replica gets its first chunk
    expected = "chain" if in_chains + waits < int(directly) else "direct"
    assert choose(plan, chunks) == expected


def random_bytes(shape, dtype, seed):
    """Draw random bits, including NaNs."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    drawn = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return drawn.view(dtype).reshape(shape)


PARTS = {
    "w1": ((6, 5), torch.bfloat16),
    "w1_bias": ((7,), torch.float32),
    "w2": ((3, 4), torch.float8_e4m3fn),
    "w2_scales": ((3, 1), torch.float32),
    "w2_scale": ((), torch.float32),
    "w3": ((11,), torch.int8),
    "w3_zero": ((), torch.int8),
    "w4": ((2, 2, 2), torch.float64),
    "w5": ((1,), torch.float8_e5m2),
    "w6": ((5,), torch.float16),
}


def weights_of(experts):
    """Return every tensor of a bundle, stacked over these experts."""
    return {
        name: torch.stack([random_bytes(shape, dtype, 1000 * index + int(e)) for e in experts])
        if len(experts)
        else torch.empty(0, *shape, dtype=dtype)
        for index, (name, (shape, dtype)) in enumerate(PARTS.items())
    }


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("relay", MODES)
@pytest.mark.parametrize("experts", [8, [0, 0, 0, 0, 0, 3, 1, 3]], ids=["even", "uneven"])
def test_slots_hold_the_bytes_of_the_home(relay, experts):
    truth = weights_of(range(8))

    def work(comm):
        balancer = Balancer._with_settings(comm, experts=experts, slots=2, relay=relay)
        bundle = weights_of(balancer.topology.home_experts(comm.rank))
        microbatch, plan = planned(balancer, skewed_ids(comm.rank), bundle)
        with microbatch.replicate() as replicas:
            slots = replicas.tensors()
            assert slots.keys() == PARTS.keys()
            for expert, host, slot in plan.replicas.tolist():
                for name, stacked in slots.items() if host == comm.rank else ():
                    assert stacked.dtype == PARTS[name][1]
                    assert stacked.shape == (2, *PARTS[name][0])
                    expected = truth[name][expert]
                    assert torch.equal(as_bytes(stacked[slot]), as_bytes(expected)), name
        return plan.num_replicas, plan.max_fanout, balancer.stats()["weights_bytes_sent"]

    results = LocalGroup(4).run(work)
    replicas, fanout, _ = results[0]
    assert replicas >= 3
    assert fanout > 1
    nbytes = Layout.of(weights_of([0]), 1).nbytes
    assert sum(sent for *_, sent in results) == replicas * nbytes


def test_a_plan_without_replicas_sends_nothing():
    def work(comm):
        balancer = Balancer(comm, experts=8, policy="none")
        bundle = weights_of(balancer.topology.home_experts(comm.rank))
        with planned(balancer, skewed_ids(comm.rank), bundle)[0].replicate():
            pass
        return balancer.stats()["weights_bytes_sent"]

    assert LocalGroup(4).run(work) == [0, 0, 0, 0]


def test_layouts_align_and_do_not_overlap():
    tensors = weights_of(range(3))
    layout = Layout.of(tensors, 3)
    assert layout == Layout.of(weights_of(range(5)), 5)
    assert hash(layout) == hash(Layout.of(weights_of(range(5)), 5))
    end = 0
    for name, (begin, stop) in layout.spans.items():
        assert begin >= end
        assert begin % 64 == 0
        assert stop - begin == tensors[name][0].numel() * tensors[name].dtype.itemsize
        end = stop
    assert layout.nbytes >= end
    assert layout.nbytes % 64 == 0
    rows = torch.stack([layout.pack(tensors, index) for index in range(3)])
    for name, view in layout.views(rows).items():
        assert torch.equal(as_bytes(view), as_bytes(tensors[name])), name
        assert view.shape == tensors[name].shape
    assert {name: list(v.shape) for name, v in layout.views(rows[:0]).items()} == {
        name: [0, *shape] for name, (shape, _) in PARTS.items()
    }


def test_invalid_bundles():
    with pytest.raises(ConfigError, match="at least one tensor"):
        Layout.of({}, 2)
    with pytest.raises(ConfigError, match=r"'b' must be stacked over 2 home experts.*\[3, 4\]"):
        Layout.of({"a": torch.zeros(2, 4), "b": torch.zeros(3, 4)}, 2)
    with pytest.raises(ConfigError, match=r"'scale' must be stacked.*got shape \[\]"):
        Layout.of({"scale": torch.tensor(1.0)}, 1)
