"""Replicas between ranks: schedules equal `hops.hops`, and weights and gradients arrive.

Ranks are processes that map each other's memory and really wait for each other. The programs of an
interpreted rank run one after the other, so that two programs work only without circular waits.
"""

import os
import time
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import pytest
import torch
from cases import random_replicas, topologies
from guard import watched
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import PATIENCE, QUICK, shared_pool
from shared_peers import LocalPeers, SharedPeers
from triton.runtime.interpreter import InterpreterBuilder

from ultraep import BalanceConfig, CommunicationError, ConfigError, Plan, Topology
from ultraep.backends.triton import signals, streamer
from ultraep.backends.triton.device import default_device, interpreted
from ultraep.backends.triton.signals import Signals
from ultraep.backends.triton.streamer import Streamer, chunks_for
from ultraep.bundle import Layout
from ultraep.hops import HOME, choose, hops

DEVICE = default_device()
MODES = ("direct", "chain", "auto")
only_interpreted = pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")


def plan_with(topology, replicas):
    rows, ranks = sorted(replicas), topology.ranks
    return Plan(
        topology,
        BalanceConfig(),
        np.zeros((ranks, topology.experts), dtype=np.int64),
        np.array(rows, dtype=np.int64).reshape(-1, 3),
        np.zeros(len(rows), dtype=np.int64),
        np.zeros((len(rows), ranks), dtype=np.int64),
        np.zeros(ranks, dtype=np.int64),
    )


def random_plan(rng, topology, fullness=0.8):
    return plan_with(topology, random_replicas(rng, topology, fullness))


def on_device(plan):
    """[C, 3] the replicas, padded to the most there can be."""
    most = max(1, plan.topology.ranks * plan.topology.slots)
    replicas = torch.full((most, 3), -1, dtype=torch.int32)
    replicas[: plan.num_replicas] = torch.from_numpy(plan.replicas.copy())
    return replicas.to(DEVICE)


# Schedules.


class Schedule(NamedTuple):
    """What one rank sends and receives."""

    hops: list[list[int]]  # source, receiver, slot, depth
    chunks: int
    longest: int
    senders: list[int]
    replicas: list[list[int]]  # host, slot
    of_homes: list[list[int]]  # first and end among the replicas


def kernel_schedule(made, plan, rank):
    """Parse what the kernel has written."""
    most, slots = max(1, plan.topology.ranks * plan.topology.slots), plan.topology.slots
    homes = len(plan.topology.home_experts(rank))
    header, numbers, senders, replicas, of_homes = made.cpu().split(
        [4, 4 * most, slots, 2 * most, 2 * homes]
    )
    sent, chunks, _, longest = header.tolist()
    return Schedule(
        numbers.view(-1, 4)[:sent].tolist(),
        chunks,
        longest,
        senders.tolist(),
        replicas.view(-1, 2)[: plan.num_replicas].tolist(),
        of_homes.view(-1, 2).tolist(),
    )


def host_schedule(plan, rank, mode, nbytes):
    longest = max((hop.depth + 1 for hop in hops(plan, "chain")), default=0)
    if mode == "auto":
        mode = choose(plan, chunks_for(longest, nbytes, programs=1))
    all_hops = hops(plan, mode)
    longest = max((hop.depth + 1 for hop in all_hops), default=0)
    places = plan.replicas[:, 1:].tolist()
    mine = plan.topology.home_experts(rank).tolist()
    sent = sorted(
        (hop for hop in all_hops if hop.sender == rank),
        key=lambda hop: (hop.depth, places.index([hop.receiver, hop.slot])),
    )
    sources = [
        mine.index(hop.expert) if hop.sender_slot == HOME else -1 - hop.sender_slot for hop in sent
    ]
    experts = plan.replicas[:, 0].tolist()
    firsts = [experts.index(expert) if expert in experts else 0 for expert in mine]
    sender_of = {(hop.receiver, hop.slot): hop.sender for hop in all_hops}
    return Schedule(
        [[s, hop.receiver, hop.slot, hop.depth] for s, hop in zip(sources, sent, strict=True)],
        chunks_for(longest, nbytes, programs=1),
        longest,
        [sender_of.get((rank, slot), -1) for slot in range(plan.topology.slots)],
        places,
        [[f, f + experts.count(expert)] for f, expert in zip(firsts, mine, strict=True)],
    )


@pytest.fixture(scope="module", autouse=True)
def no_clock():
    """Skip the measurement of a poll: no kernel of this process waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signals, "polls_per_second", lambda device: 1000.0)
        yield


def of_bytes(nbytes):
    return Layout((("weight", (nbytes,), torch.uint8),))


def streamer_of(group, rank, topology, mode):
    board = Signals(group.of(rank), slots=topology.slots, buffers=1, timeout=1.0)
    return Streamer(board, topology, relay=mode, programs=1)


def schedules(plan, mode, nbytes):
    topology, replicas = plan.topology, on_device(plan)
    group = LocalPeers(topology.ranks, device=DEVICE)
    for rank in range(topology.ranks):
        made_by = streamer_of(group, rank, topology, mode)
        made = torch.full((made_by.size,), -7, dtype=torch.int32, device=DEVICE)
        made_by.schedule(replicas, of_bytes(nbytes), made)
        yield kernel_schedule(made, plan, rank), host_schedule(plan, rank, mode, nbytes)


@only_interpreted
@settings(max_examples=25)
@given(
    topologies().filter(lambda topology: topology.slots and topology.ranks > 1),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.3, 0.8, 1.0]),
    st.sampled_from(MODES),
    st.sampled_from([64, 1 << 20, 1 << 26, 1 << 34]),
)
def test_schedules_are_those_of_the_plain_twin(topology, seed, fullness, mode, nbytes):
    plan = random_plan(np.random.default_rng(seed), topology, fullness)
    for actual, expected in schedules(plan, mode, nbytes):
        assert actual == expected


# Transfers between processes.


@contextmanager
def small_tiles():
    """Use small experts in many chunks and tiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamer, "WORDS", 32)
        patch.setattr(streamer, "SIGNAL_COST", 64)
        yield


class Rank:
    """One rank with its own weights, and spare slots for weights of others."""

    def __init__(self, peers, topology, *, relay="chain", timeout=PATIENCE):
        self.topology = topology
        self.board = Signals(peers, slots=topology.slots, buffers=1, timeout=timeout)
        self.streamer = Streamer(self.board, topology, relay=relay, programs=1)
        homes = len(topology.home_experts(peers.rank))
        self.tensors = {"weight": torch.ones(homes, 200)}
        self.layout = Layout.of(self.tensors, homes)
        self.rows = peers.allocate("slots", topology.slots * self.layout.nbytes)

    def schedule(self, plan):
        made = torch.zeros(self.streamer.size, dtype=torch.int32)
        self.streamer.schedule(on_device(plan), self.layout, made)
        return made

    def fill(self, made):
        self.streamer.fill(made, self.layout, self.tensors, self.rows)


def nap(rng):
    """Sleep some milliseconds, or not at all."""
    time.sleep(rng.choice([0.0, 0.0, 0.003, 0.01]))


@contextmanager
def dawdling(rng, chance):
    """Let kernels sleep now and then, long enough for other ranks to go on."""
    load = InterpreterBuilder.create_masked_load

    def late(self, *args):
        if rng.random() < chance:
            time.sleep(0.05)
        return load(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", late)
        yield


def test_bundles_at_one_address_may_have_different_shapes():
    made_by = streamer_of(LocalPeers(2, device=DEVICE), 0, Topology(ranks=2, experts=2), "auto")
    memory = torch.zeros(64, device=DEVICE)
    for length in (16, 64):
        tensors = {"weight": memory[None, :length]}
        _, parts = made_by.sources(Layout.of(tensors, 1), tensors)
        assert parts.tolist() == [[0, 4 * length, 1]]


def test_weights_must_be_contiguous():
    made_by = streamer_of(LocalPeers(2, device=DEVICE), 0, Topology(ranks=2, experts=4), "auto")
    tensors = {"weight": torch.zeros(2, 6, 4, device=DEVICE).transpose(1, 2)}
    with pytest.raises(ConfigError, match=r"'weight' must be contiguous, got shape \[2, 4, 6\]"):
        made_by.sources(Layout.of(tensors, 2), tensors)


# Barriers.


def share_rows(rank, group, rounds, numbers):
    peers, rng = SharedPeers(group), np.random.default_rng(rank)
    board = Signals(peers, slots=1, buffers=1, timeout=PATIENCE, numbers=numbers)
    gathered = torch.empty(peers.size, numbers, dtype=torch.int32)
    every = torch.arange(peers.size * numbers, dtype=torch.int32).view(peers.size, numbers)
    for number in range(rounds):
        expected = 1000 * number + every
        gathered.fill_(-1)
        with dawdling(rng, 0.02):
            board.share(expected[rank].clone(), gathered)
        assert torch.equal(gathered, expected), number
        if number % 5 == 0:
            nap(rng)
            board.barrier("rows")
    board.check()
    return int(board.words[board.channel(0)])


@only_interpreted
def test_rows_are_shared_in_every_round():
    assert shared_pool().run(3, share_rows, 20, 37) == [24] * 3


# Faults.


def error_of(board):
    with pytest.raises(CommunicationError) as caught:
        board.check()
    return str(caught.value)


def act_of(me, stage):
    """Do what all ranks do together, waiting for rank 2."""
    if stage != "weights":
        return me.board.barrier(stage)
    plan = plan_with(me.topology, [(4, 0, 0), (4, 1, 0)])
    return me.fill(me.schedule(plan))


def without_rank_2(rank, group, timeout):
    """Return the errors of every stage, and the time of all. After a fault, no rank waits."""
    topology, actual, begin = Topology(ranks=3, experts=6), [], time.monotonic()
    with small_tiles():
        for stage in signals.STAGES:
            me = Rank(SharedPeers(group), topology, relay="direct", timeout=timeout)
            if rank == 2:
                continue
            act_of(me, stage)
            actual.append(error_of(me.board))
            me.board.poll_limit = 2**31 - 1
            for other in signals.STAGES:
                act_of(me, other)
            assert error_of(me.board) == actual[-1]
    return actual, time.monotonic() - begin


@only_interpreted
def test_a_rank_that_never_arrives_is_named():
    for rank, (errors, seconds) in enumerate(shared_pool().run(3, without_rank_2, 0.5)[:2]):
        assert seconds < QUICK
        for stage, message in zip(signals.STAGES, errors, strict=True):
            assert message.startswith("rank 2 did not arrive within 0.5 s")
            assert f"at stage {stage!r} (detected by rank {rank})" in message


def end_at_store(number):
    """End this process abruptly after `number` stores of kernels."""
    store, stores = InterpreterBuilder.create_masked_store, iter(range(number))

    def last_store(self, *args):
        if next(stores, None) is None:
            os._exit(1)
        return store(self, *args)

    InterpreterBuilder.create_masked_store = last_store


def die_in_a_chain(rank, group, timeout):
    topology = Topology(ranks=4, experts=8)
    plan = plan_with(topology, [(0, host, 0) for host in (1, 2, 3)])
    with small_tiles():
        me = Rank(SharedPeers(group), topology)
        me.fill(me.schedule(plan))
        me.board.check()
        made = me.schedule(plan)
        me.board.barrier("rows")
        me.board.poll_limit = int(me.board.poll_limit * timeout / PATIENCE)
        if rank == 1:
            assert int(made[1]) > 2, "no chunk left to send"
            end_at_store(3)
        begin = time.monotonic()
        me.fill(made)
        me.board.barrier("rows")
        return error_of(me.board), time.monotonic() - begin


@only_interpreted
def test_a_rank_that_dies_in_a_chain_stops_the_others():
    actual = shared_pool().outcomes(4, die_in_a_chain, 2.0)
    by_rank = {outcome.rank: outcome for outcome in actual}
    assert by_rank[1].kind == "lost", by_rank[1].value
    for rank in (0, 2, 3):
        assert by_rank[rank].kind == "result", by_rank[rank].value
        message, seconds = by_rank[rank].value
        assert message.startswith(("rank 1 did not arrive", "rank 2 did not arrive"))
        assert seconds < QUICK


# Gradients.


@pytest.fixture
def small_pieces(monkeypatch):
    """Use several tiles of few gradients."""
    if interpreted():
        monkeypatch.setattr(streamer, "GRADIENTS", 32)


class Gradients:
    """Gradients of the home experts of one rank, and of the replicas on all ranks."""

    def __init__(self, plan, rank, width, dtype):
        self.plan, self.topology, self.rank = plan, plan.topology, rank
        self.width, self.dtype = width, dtype
        group, slots = LocalPeers(self.topology.ranks, device=DEVICE), self.topology.slots
        self.streamer = streamer_of(group, rank, self.topology, "auto")
        self.made = torch.zeros(self.streamer.size, dtype=torch.int32, device=DEVICE)
        self.streamer.schedule(on_device(plan), of_bytes(64), self.made)
        nbytes = slots * width * dtype.itemsize
        self.rows = group.of(rank).allocate("gradients", nbytes)
        self.of_copies = [piece.view(dtype).view(slots, width) for piece in self.rows.handle]
        generator = torch.Generator().manual_seed(width)
        for piece in self.of_copies:
            piece.copy_(self.draw(generator, slots))
        homes = len(self.topology.home_experts(rank))
        self.of_homes = self.draw(generator, homes).to(DEVICE)

    def draw(self, generator, rows):
        """Draw many magnitudes, so that another order gives other sums; some are -0."""
        drawn = torch.randn(rows, self.width, generator=generator, dtype=torch.float64)
        drawn *= 10 ** torch.randint(-3, 4, drawn.shape, generator=generator)
        drawn[:, ::5] = -0.0
        return drawn.to(self.dtype)

    def expected(self):
        """[H, P] one addition after the other, in plan order."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        sums = self.of_homes.to(wide, copy=True)
        mine = self.topology.home_experts(self.rank).tolist()
        for expert, host, slot in self.plan.replicas.tolist():
            if expert in mine:
                sums[mine.index(expert)] += self.of_copies[host][slot].to(wide)
        return sums.to(self.dtype)

    def pull(self, **options):
        with watched(also=self.rows.handle) if interpreted() else nullcontext():
            streamer.pull(self.of_homes, self.rows, self.made, self.streamer, **options)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


FAN_OUTS = [0, 1, 2, 3, 4, 5]  # replicas of the experts of rank 0
FANNED = Topology(ranks=6, experts=10, slots=3, homes=[0, 1, 0, 0, 0, 2, 0, 0, 3, 4])


def fanned_plan():
    """Every fan-out; replicas of other homes are in between."""
    mine = FANNED.home_experts(0).tolist()
    free = {host: [2, 0, 1] for host in range(1, 6)}
    replicas = [
        (expert, host, free[host].pop())
        for expert, replicas in zip(mine, FAN_OUTS, strict=True)
        for host in list(range(1 + expert % 2, 6))[:replicas]
        if free[host]
    ]
    return plan_with(FANNED, [*replicas, (1, 0, 0), (8, 0, 2)])


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("width", "large"), [(1, True), (32, False), (77, True), (77, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_are_added_in_the_order_of_the_plan(dtype, width, large):
    for rank in (0, 3):
        case = Gradients(fanned_plan(), rank, width, dtype)
        expected, replicas = case.expected(), [piece.clone() for piece in case.of_copies]
        case.pull(programs=2, large=large)
        assert torch.equal(bits(case.of_homes), bits(expected))
        for piece, rows in zip(case.of_copies, replicas, strict=True):
            assert torch.equal(bits(piece), bits(rows))
