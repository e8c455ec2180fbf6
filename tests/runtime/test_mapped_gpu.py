"""Mapped memory on a GPU: many ranks on one device, late ranks, graphs, missing ranks.

Ranks of one process wait for each other on the device, so each stream needs its own hardware queue:
they run in a process that is started with enough of them. Kernels are compiled and loaded before
any rank waits, because loading may wait for running kernels.

ULTRAEP_GPU_ROUNDS: plans of each test; the default is 200.
"""

import os
import time
import warnings
from contextlib import ExitStack, contextmanager, suppress
from unittest import mock

import numpy as np
import pytest
import torch
from dense import assert_close
from gpu_ranks import processes

from ultraep import (
    BalancedMoE,
    Balancer,
    CommunicationError,
    Topology,
    UltraEPError,
)
from ultraep.backends.triton import streamer
from ultraep.backends.triton.signals import Signals
from ultraep.backends.triton.streamer import Streamer
from ultraep.bundle import Layout
from ultraep.runtime.mapped.peers import LocalPeers, SymmetricPeers
from ultraep.runtime.settings import DeviceShare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CUDA = torch.device("cuda")
ROUNDS = int(os.environ.get("ULTRAEP_GPU_ROUNDS", "200"))
LONG = 600.0 + ROUNDS  # seconds; only what hangs needs them
RANKS, HOMES = 4, 3  # home experts of each rank
SCRIBBLE = 0xAB
MILLISECOND = 1_700_000  # cycles, about


@pytest.fixture(scope="module")
def pool():
    """One process for many tests."""
    with processes(1) as pool:
        yield pool


@pytest.fixture
def two():
    """New processes for every test: torch's symmetric memory remembers groups by their names."""
    with processes(2) as pool:
        yield pool


def small_tiles():
    """Small experts in many chunks and tiles."""
    return mock.patch.multiple(streamer, WORDS=256, SIGNAL_COST=256)


def random_replicas(rng, topology, fullness):
    """Put random experts into random spare slots, some more often than others."""
    liked, replicas = rng.normal(0, 2, topology.experts), []
    for host in range(topology.ranks):
        noise = liked + rng.gumbel(size=topology.experts)
        away = [e for e in np.argsort(-noise).tolist() if topology.home_of_expert[e] != host]
        slots = rng.permutation(topology.slots).tolist()
        held = [place for place in zip(away, slots, strict=False) if rng.random() < fullness]
        replicas += [(expert, host, slot) for expert, slot in held]
    return sorted(replicas)


def in_a_row(replicas, topology):
    """Return [C, 3] the replicas, padded to the most there can be."""
    rows = torch.full((topology.ranks * topology.slots, 3), -1, dtype=torch.int32)
    rows[: len(replicas)] = torch.tensor(replicas, dtype=torch.int32).view(-1, 3)
    return rows


def bundle_of(experts):
    """Tensors of many types, stacked over experts."""
    generator = torch.Generator().manual_seed(0)
    drawn = {
        "weight": torch.randn(experts, 64, 65, generator=generator).bfloat16(),
        "quantised": torch.randint(-99, 99, (experts, 1001), generator=generator).to(torch.int8),
        "scale": torch.randn(experts, generator=generator),
    }
    return {name: tensor.to(CUDA) for name, tensor in drawn.items()}


@contextmanager
def no_waiting(all_signals):
    """Do not wait for other ranks in this block; then restore the signals."""
    patience = [signals.poll_limit for signals in all_signals]
    for signals in all_signals:
        signals.poll_limit = 1
    yield
    torch.cuda.synchronize()
    for signals, polls in zip(all_signals, patience, strict=True):
        signals.poll_limit = polls
        signals.region.local.zero_()
    torch.cuda.synchronize()


class World:
    """The ranks of one device: each with home experts, spare slots and a stream."""

    def __init__(self, relay="chain", *, slots=2, programs=8, timeout=60.0):
        self.topology = Topology(ranks=RANKS, experts=RANKS * HOMES, slots=slots)
        group = LocalPeers(RANKS)
        peers = [group.of(rank) for rank in range(RANKS)]
        self.all_signals = [Signals(p, slots=slots, buffers=1, timeout=timeout) for p in peers]
        self.streamers = [
            Streamer(signals, self.topology, relay=relay, programs=programs)
            for signals in self.all_signals
        ]
        self.experts = bundle_of(RANKS * HOMES)
        self.tensors = [
            {name: t[r * HOMES : (r + 1) * HOMES].clone() for name, t in self.experts.items()}
            for r in range(RANKS)
        ]
        self.layout = Layout.of(self.tensors[0], HOMES)
        self.rows = [p.allocate("slots", slots * self.layout.nbytes) for p in peers]
        self.replicas = in_a_row([], self.topology).to(CUDA)
        self.made = torch.zeros(RANKS, self.streamers[0].size, dtype=torch.int32, device=CUDA)
        self.streams = [torch.cuda.Stream() for _ in range(RANKS)]
        torch.cuda.synchronize()
        # Loaded now: loading waits for running kernels, which will wait for each other.
        torch.cuda._sleep(1)
        with no_waiting(self.all_signals):
            self.launch(self.fill, range(RANKS))

    def schedule(self, rank):
        self.streamers[rank].schedule(self.replicas, self.layout, self.made[rank])

    def fill(self, rank):
        """Schedule and send the replicas of the plan on one rank."""
        self.schedule(rank)
        self.streamers[rank].fill(self.made[rank], self.layout, self.tensors[rank], self.rows[rank])

    def launch(self, act, ranks, rng=None):
        """Launch one rank after the other, each on its stream, some of them late."""
        for rank in ranks:
            with torch.cuda.stream(self.streams[rank]):
                if rng is not None and rng.random() < 0.4:
                    torch.cuda._sleep(int(rng.integers(1, MILLISECOND)))
                act(rank)

    def plan(self, replicas):
        """Write the plan where all ranks read it, and overwrite the slots."""
        self.replicas.copy_(in_a_row(replicas, self.topology))
        for rows in self.rows:
            rows.local.fill_(SCRIBBLE)
        torch.cuda.synchronize()

    def run(self, act, replicas, rng):
        """Run all ranks in random order, up to three times; check all slots."""
        self.plan(replicas)
        for _ in range(rng.integers(1, 4)):
            self.launch(act, rng.permutation(RANKS).tolist(), rng)
        torch.cuda.synchronize()
        for signals in self.all_signals:
            signals.check()
        shape = (self.topology.slots, self.layout.nbytes)
        slots = [rows.local.view(shape) for rows in self.rows]
        views = [self.layout.views(own) for own in slots]
        for expert, host, slot in replicas:
            for name, expected in self.experts.items():
                assert torch.equal(views[host][name][slot], expected[expert]), (expert, host, name)
        held = {(host, slot) for _, host, slot in replicas}
        free = [
            own[slot]
            for h, own in enumerate(slots)
            for slot in range(shape[0])
            if (h, slot) not in held
        ]
        assert all((row == SCRIBBLE).all() for row in free)


def random_plans(rank, group, relay, rounds, captured):
    """Run one plan after the other, launched anew or by replaying graphs."""
    rng = np.random.default_rng(rounds)
    with small_tiles():
        world = World(relay)
        act = replay_of(world) if captured else world.fill
        lengths = set()
        for _ in range(rounds):
            replicas = random_replicas(rng, world.topology, rng.choice([0.4, 1.0]))
            world.run(act, replicas, rng)
            lengths.add(int(world.made[0, 3]))
        return lengths


def replay_of(world):
    """Return `world.fill` as a replay of one graph per rank."""
    graphs = [torch.cuda.CUDAGraph() for _ in range(RANKS)]
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=world.streams[rank], capture_error_mode="thread_local"):
            world.fill(rank)
    return lambda rank: graphs[rank].replay()


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("relay", ["direct", "chain", "auto"])
def test_experts_arrive_bit_for_bit(pool, relay, captured):
    (lengths,) = pool.run(1, random_plans, relay, ROUNDS, captured, timeout=LONG)
    assert (max(lengths) > 1) == (relay != "direct")


def all_in_one_launch(rank, group, rounds):
    rng = np.random.default_rng(0)
    with small_tiles():
        world = World("chain")
        tables = [
            own.sources(world.layout, tensors)
            for own, tensors in zip(world.streamers, world.tensors, strict=True)
        ]
        homes, parts = torch.stack([table[0] for table in tables]), tables[0][1]

        def act(rank):
            if rank:
                return
            for each in range(RANKS):
                world.schedule(each)
            world.streamers[0].launch(
                homes, parts, world.made, world.layout.nbytes, world.rows[0], 0, 0, RANKS
            )

        for _ in range(rounds):
            world.run(act, random_replicas(rng, world.topology, 1.0), rng)


def test_many_ranks_in_one_launch(pool):
    pool.run(1, all_in_one_launch, 20)


def without_rank_3(rank, group, timeout):
    """Return the errors of all ranks, and the seconds of 20 further barriers."""
    with small_tiles():
        world = World("direct", timeout=timeout)
        world.plan([(3 * HOMES, host, 0) for host in range(3)])
        world.launch(world.fill, range(3))
        torch.cuda.synchronize()
        begin = time.monotonic()
        for _ in range(20):
            world.launch(lambda rank: world.all_signals[rank].barrier("rows"), range(3))
        torch.cuda.synchronize()
        return [complaint(signals) for signals in world.all_signals], time.monotonic() - begin


def complaint(signals):
    with pytest.raises(CommunicationError) as caught:
        signals.check()
    return str(caught.value)


def test_a_rank_that_never_comes_is_named(pool):
    ((complaints, seconds),) = pool.run(1, without_rank_3, 0.5)
    for rank, message in enumerate(complaints):
        assert message.startswith("rank 3 did not arrive within 0.5 s")
        assert f"at stage 'weights' (detected by rank {rank})" in message
    assert seconds < 20 * 0.5  # ranks do not wait a second time


# The whole layer.


TOKENS, TOP_K, EXPERTS, HIDDEN, FFN = 96, 2, 8, 128, 64


class Layers:
    """The layer of every rank; tokens and gradients keep their memory, as graphs require."""

    def __init__(self, policy):
        group = LocalPeers(RANKS)
        self.streams = [torch.cuda.Stream() for _ in range(RANKS)]
        self.balancers = [
            Balancer(
                peers=group.of(rank),
                experts=EXPERTS,
                data_plane="mapped",
                tokens=TOKENS,
                capacity=RANKS * TOKENS * TOP_K,
                policy=policy,
                relay="chain",
                timeout=60.0,
                share=DeviceShare(sms=16),
            )
            for rank in range(RANKS)
        ]
        self.layers = [
            BalancedMoE.swiglu(
                HIDDEN, FFN, EXPERTS, TOP_K, balancer=own, dtype=torch.bfloat16, device=CUDA
            )
            for own in self.balancers
        ]
        shapes = [(TOKENS - 5 * rank, HIDDEN) for rank in range(RANKS)]
        options = {"dtype": torch.bfloat16, "device": CUDA}
        self.inputs = [torch.randn(s, **options).requires_grad_() for s in shapes]
        self.gradients = [torch.randn(s, **options) for s in shapes]
        self.names = ["y", "x", *(name for name, _ in self.layers[0].named_parameters())]
        self.prepare()

    def prepare(self):
        """Allocate all memory before any rank waits: allocation waits for running kernels."""
        ids = torch.zeros(TOKENS, TOP_K, dtype=torch.int64, device=CUDA)
        for own, layer, x in zip(self.balancers, self.layers, self.inputs, strict=True):
            own.prepare(ids, x, layer.experts.bundle)
        self.workspaces = [own.plane("cuda").workspaces.last for own in self.balancers]
        torch.cuda.synchronize()

    def warm_up(self):
        """Run twice: the second pass frees what the first one allocated, and allocates again."""
        for _ in range(2):
            with no_waiting([workspace.memory.signals for workspace in self.workspaces]):
                self.backward(self.forward())
            for own, workspace in zip(self.balancers, self.workspaces, strict=True):
                for _ in range(3):  # faults of passes without the other ranks
                    with suppress(UltraEPError):
                        own.check()
                own.check()
                own.reset_stats()
                workspace._fetch = None  # of faults that were expected

    def draw(self, seed):
        """Draw other tokens, with some experts that most of them prefer."""
        generator = torch.Generator().manual_seed(seed)
        common = 2 * torch.randn(HIDDEN, generator=generator)
        with torch.no_grad():
            for x, gradient in zip(self.inputs, self.gradients, strict=True):
                x.copy_(torch.randn(x.shape, generator=generator) + common)
                gradient.copy_(torch.randn(x.shape, generator=generator))
        torch.cuda.synchronize()

    def forward(self):
        """Launch all ranks without waiting."""
        outputs = []
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                outputs.append(self.layers[rank](self.inputs[rank]))
        return outputs

    def backward(self, outputs):
        """[y, gradients of x and of all parameters] of every rank."""
        actual = []
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                actual.append(self.results(rank, outputs[rank]))
        return actual

    def results(self, rank, y):
        expected = [self.inputs[rank], *self.layers[rank].parameters()]
        return [y.detach(), *torch.autograd.grad(y, expected, self.gradients[rank])]

    def check(self, actual):
        """Wait for all ranks and return the tensors on the host, by name."""
        torch.cuda.synchronize()
        for own in self.balancers:
            own.check()
        return [dict(zip(self.names, [t.cpu() for t in own], strict=True)) for own in actual]

    def eager(self):
        return self.check(self.backward(self.forward()))

    def capture(self):
        """Capture a graph per rank; return a function that replays them and returns the tensors."""
        graphs, static = [torch.cuda.CUDAGraph() for _ in range(RANKS)], []
        for rank, graph in enumerate(graphs):
            with torch.cuda.graph(
                graph, stream=self.streams[rank], capture_error_mode="thread_local"
            ):
                static.append(self.results(rank, self.layers[rank](self.inputs[rank])))

        def replay(rng):
            for rank in rng.permutation(RANKS).tolist():
                with torch.cuda.stream(self.streams[rank]):
                    if rng.random() < 0.3:
                        torch.cuda._sleep(int(rng.integers(1, MILLISECOND)))
                    graphs[rank].replay()
            return self.check(static)

        return replay


def promised_replays(rank, group):
    """Return the replicas sent in each replay, and the results of all replays."""
    layers, rng = Layers("ultraep"), np.random.default_rng(1)
    layers.warm_up()
    replay = layers.capture()
    layers.draw(3)
    actual, counts = [], []

    def once():
        before = sum(workspace.memory.signals.sent for workspace in layers.workspaces)
        actual.append(replay(rng))
        counts.append(
            sum(workspace.memory.signals.sent for workspace in layers.workspaces) - before
        )

    for promise in (False, True, False):
        with ExitStack() as stack:
            for own in layers.balancers if promise else ():
                stack.enter_context(own.unchanged_weights())
            torch.cuda.synchronize()  # the promise is made on this stream, and ranks use others
            once()
            once()
        torch.cuda.synchronize()
    return counts, actual


def test_replays_inside_of_a_promise_send_once(pool):
    ((counts, (first, *others)),) = pool.run(1, promised_replays, timeout=LONG)
    sent = counts[0]
    assert sent > 0
    assert counts == [sent, sent, sent, 0, sent, sent]
    for other in others:
        for own, expected in zip(other, first, strict=True):
            assert all(torch.equal(own[name], expected[name]) for name in expected)


def passes_of_the_layer(rank, group, rounds):
    """Compare a graph with eager passes and with unbalanced ones; return replicas and stats."""
    rng = np.random.default_rng(0)
    captured = Layers("ultraep")
    captured.warm_up()
    replay = captured.capture()
    launched, plain = Layers("ultraep"), Layers("none")
    launched.warm_up()
    plain.warm_up()
    copies = []
    for seed in range(rounds):
        for layers in (captured, launched, plain):
            layers.draw(seed)
        replayed, again = replay(rng), replay(rng)
        for actual, repeated, eager, unbalanced in zip(
            replayed, again, launched.eager(), plain.eager(), strict=True
        ):
            assert torch.equal(actual["y"], unbalanced["y"])
            for name, tensor in actual.items():
                assert torch.equal(tensor, repeated[name]), (seed, name)
                if name == "router.weight":  # a product of torch
                    assert_close(tensor, eager[name], name)
                else:
                    assert torch.equal(tensor, eager[name]), (seed, name)
                assert_close(tensor, unbalanced[name], name)
        copies.append(int(captured.layers[0].last_plan.num_replicas))
    stats = [layers.balancers[0].stats() for layers in (captured, launched, plain)]
    return copies, stats


def test_a_graph_of_the_layer_gives_what_the_layer_gives(pool):
    rounds = max(2, ROUNDS // 10)
    ((copies, stats),) = pool.run(1, passes_of_the_layer, rounds, timeout=LONG)
    assert sum(copies) > 0
    assert [one["microbatches"] for one in stats] == [0, rounds, rounds]  # replays are not counted
    assert [one["copies"] for one in stats] == [0, sum(copies), 0]


# Two processes on one device.


def pair(group, timeout):
    """One rank of two that share memory through the driver."""
    warnings.simplefilter("default")  # torch's symmetric memory warns
    peers = SymmetricPeers(group, device="cuda:0")
    topology, rank = Topology(ranks=2, experts=2 * HOMES), peers.rank
    signals = Signals(peers, slots=1, buffers=1, timeout=timeout)
    sender = Streamer(signals, topology, relay="chain", programs=8)
    experts = bundle_of(2 * HOMES)
    tensors = {name: t[rank * HOMES : (rank + 1) * HOMES].clone() for name, t in experts.items()}
    layout = Layout.of(tensors, HOMES)
    rows = peers.allocate("slots", layout.nbytes)
    made = torch.zeros(sender.size, dtype=torch.int32, device=CUDA)

    def fill(expert):
        """Send this home expert of each rank to the other rank."""
        replicas = [(expert, 1, 0), (HOMES + expert, 0, 0)]
        sender.schedule(in_a_row(replicas, topology).to(CUDA), layout, made)
        sender.fill(made, layout, tensors, rows)
        torch.cuda.synchronize()
        signals.check()
        views, expected = layout.views(rows.local[None]), expert + HOMES * (1 - rank)
        assert all(torch.equal(views[name][0], t[expected]) for name, t in experts.items())

    return peers, signals, fill


def outlive_rank_1(rank, group, timeout):
    peers, signals, fill = pair(group, timeout)
    fill(0)
    peers.gather_objects("filled")
    if rank == 1:
        os._exit(1)
    with pytest.raises(CommunicationError) as caught:
        fill(1)
    signals.barrier("rows")
    torch.cuda.synchronize()
    return str(caught.value)


def test_a_process_that_dies_stops_the_other(two):
    actual = {outcome.rank: outcome for outcome in two.outcomes(2, outlive_rank_1, 5.0)}
    assert actual[1].kind == "lost", actual[1].value
    assert actual[0].kind == "result", actual[0].value
    assert actual[0].value.startswith("rank 1 did not arrive within 5 s")
