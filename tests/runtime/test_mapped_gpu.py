"""Mapped memory on a GPU: processes that share the device, late ranks, graphs, missing ranks.

ULTRAEP_GPU_ROUNDS: plans of each test; the default is 200.
"""

import os
import warnings
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from cases import random_replicas
from dense import assert_close
from gpu_ranks import mapped

from ultraep import BalancedMoE, CommunicationError, Topology
from ultraep.backends.triton import streamer
from ultraep.backends.triton.signals import Signals
from ultraep.backends.triton.streamer import Streamer
from ultraep.bundle import Layout
from ultraep.runtime.mapped.peers import SymmetricPeers

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
ROUNDS = int(os.environ.get("ULTRAEP_GPU_ROUNDS", "200"))
LONG = 600.0 + ROUNDS  # seconds; only what hangs needs them
HOMES = 3  # home experts of each rank
SCRIBBLE = 0xAB
MILLISECOND = 1_700_000  # cycles, about


def small_tiles():
    return mock.patch.multiple(streamer, WORDS=256, SIGNAL_COST=256)


def bundle_of(experts):
    """Tensors of many types, stacked over experts."""
    generator = torch.Generator().manual_seed(0)
    drawn = {
        "weight": torch.randn(experts, 64, 65, generator=generator).bfloat16(),
        "quantised": torch.randint(-99, 99, (experts, 1001), generator=generator).to(torch.int8),
        "scale": torch.randn(experts, generator=generator),
    }
    return {name: tensor.to(CUDA) for name, tensor in drawn.items()}


def late(rng):
    """Let the device of this rank begin late, sometimes."""
    if rng.random() < 0.4:
        torch.cuda._sleep(int(rng.integers(1, MILLISECOND)))


class Rank:
    """One rank with home experts and spare slots, which sends replicas without a balancer."""

    def __init__(self, peers, relay, *, slots=2, timeout=60.0):
        self.peers, self.rank = peers, peers.rank
        self.topology = Topology(ranks=peers.size, experts=peers.size * HOMES, slots=slots)
        self.signals = Signals(peers, slots=slots, buffers=1, timeout=timeout)
        self.streamer = Streamer(self.signals, self.topology, relay=relay, programs=8)
        self.experts = bundle_of(self.topology.experts)
        homes = slice(self.rank * HOMES, (self.rank + 1) * HOMES)
        self.tensors = {name: tensor[homes].clone() for name, tensor in self.experts.items()}
        self.layout = Layout.of(self.tensors, HOMES)
        self.rows = peers.allocate("slots", slots * self.layout.nbytes)
        self.replicas = torch.full((peers.size * slots, 3), -1, dtype=torch.int32, device=CUDA)
        self.made = torch.zeros(self.streamer.size, dtype=torch.int32, device=CUDA)

    def plan(self, replicas):
        """Write the plan where kernels read it, and overwrite the slots."""
        self.replicas.fill_(-1)
        self.replicas[: len(replicas)] = torch.tensor(replicas, dtype=torch.int32).view(-1, 3)
        self.rows.local.fill_(SCRIBBLE)

    def fill(self):
        self.streamer.schedule(self.replicas, self.layout, self.made)
        self.streamer.fill(self.made, self.layout, self.tensors, self.rows)

    def replay(self):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.fill()
        return graph.replay

    def check(self, replicas):
        torch.cuda.synchronize()
        self.signals.check()
        slots = self.rows.local.view(self.topology.slots, self.layout.nbytes)
        views = self.layout.views(slots)
        held = {slot: expert for expert, host, slot in replicas if host == self.rank}
        for slot, row in enumerate(slots):
            if slot not in held:
                assert (row == SCRIBBLE).all(), slot
                continue
            for name, expected in self.experts.items():
                assert torch.equal(views[name][slot], expected[held[slot]]), (slot, name)


def symmetric(group):
    warnings.simplefilter("default")  # torch's symmetric memory warns
    return SymmetricPeers(group, device="cuda:0")


def random_plans(rank, group, rounds):
    peers, own, longest = symmetric(group), np.random.default_rng(rank), {}
    for relay, captured in product(("direct", "chain", "auto"), (False, True)):
        with small_tiles():
            world, rng = Rank(peers, relay), np.random.default_rng(rounds)
            world.fill()  # loads kernels before a capture
            act, lengths = world.replay() if captured else world.fill, set()
            for _ in range(rounds):
                replicas = random_replicas(rng, world.topology, rng.choice([0.4, 1.0]))
                world.plan(replicas)
                for _ in range(rng.integers(1, 4)):
                    late(own)
                    act()
                world.check(replicas)
                lengths.add(int(world.made[3]))
            longest[relay, captured] = max(lengths)
            peers.gather_objects("no rank needs this memory any more")
    return longest


def test_experts_arrive_bit_for_bit(four):
    for longest in four.run(4, random_plans, ROUNDS, timeout=LONG):
        assert len(longest) == 6
        for (relay, _), length in longest.items():
            assert (length > 1) == (relay != "direct")


def outlive_rank_1(rank, group, timeout):
    world = Rank(symmetric(group), "chain", slots=1, timeout=timeout)
    for expert in (0, 1):
        replicas = [(expert, 1, 0), (HOMES + expert, 0, 0)]
        world.plan(replicas)
        world.fill()
        if expert == 0:
            world.check(replicas)
            world.peers.gather_objects("filled")
            if rank == 1:
                os._exit(1)
    with pytest.raises(CommunicationError) as caught:
        world.check(replicas)
    world.signals.barrier("rows")
    torch.cuda.synchronize()
    return str(caught.value)


def test_a_process_that_dies_stops_the_other(mortal):
    actual = {outcome.rank: outcome for outcome in mortal.outcomes(2, outlive_rank_1, 5.0)}
    assert actual[1].kind == "lost", actual[1].value
    assert actual[0].kind == "result", actual[0].value
    assert actual[0].value.startswith("rank 1 did not arrive within 5 s")


# The whole layer.


TOKENS, TOP_K, EXPERTS, HIDDEN, FFN = 96, 2, 8, 128, 64


class MappedLayer:
    """The layer of one rank; tokens and gradients keep their memory, as graphs require."""

    def __init__(self, group, policy):
        self.balancer = mapped(
            group,
            experts=EXPERTS,
            capacity=group.size() * TOKENS * TOP_K,
            policy=policy,
            relay="chain",
        )
        options = {"dtype": torch.bfloat16, "device": CUDA}
        self.layer = BalancedMoE.swiglu(
            HIDDEN, FFN, EXPERTS, TOP_K, balancer=self.balancer, **options
        )
        shape, self.rank = (TOKENS - 5 * group.rank(), HIDDEN), group.rank()
        self.x = torch.randn(shape, **options).requires_grad_()
        self.dy = torch.randn(shape, **options)
        self.names = ["y", "x", *(name for name, _ in self.layer.named_parameters())]
        self.pass_()  # loads kernels
        self.balancer.check()
        self.balancer.reset_stats()

    def draw(self, seed):
        """Draw other tokens, with some experts that most of them prefer."""
        common = 2 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed))
        generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        with torch.no_grad():
            self.x.copy_(torch.randn(self.x.shape, generator=generator) + common)
            self.dy.copy_(torch.randn(self.x.shape, generator=generator))

    def pass_(self):
        """[y, gradients of x and of all parameters]."""
        y = self.layer(self.x)
        leaves = [self.x, *self.layer.parameters()]
        return [y.detach(), *torch.autograd.grad(y, leaves, self.dy)]

    def on_host(self, tensors):
        torch.cuda.synchronize()
        self.balancer.check()
        return dict(zip(self.names, [tensor.cpu() for tensor in tensors], strict=True))

    def capture(self):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            static = self.pass_()

        def replay(rng):
            late(rng)
            graph.replay()
            return self.on_host(static)

        return replay


def passes_of_the_layer(rank, group, rounds):
    """Compare a graph with eager passes and with unbalanced ones; return replicas and stats."""
    rng, replicas = np.random.default_rng(rank), []
    captured, launched = MappedLayer(group, "ultraep"), MappedLayer(group, "ultraep")
    plain = MappedLayer(group, "none")
    replay = captured.capture()
    for seed in range(rounds):
        for layer in (captured, launched, plain):
            layer.draw(seed)
        actual, repeated = replay(rng), replay(rng)
        eager = launched.on_host(launched.pass_())
        unbalanced = plain.on_host(plain.pass_())
        assert torch.equal(actual["y"], unbalanced["y"])
        for name, tensor in actual.items():
            assert torch.equal(tensor, repeated[name]), (seed, name)
            if name == "router.weight":  # a product of torch
                assert_close(tensor, eager[name], name)
            else:
                assert torch.equal(tensor, eager[name]), (seed, name)
            assert_close(tensor, unbalanced[name], name)
        replicas.append(int(captured.layer.last_plan.num_replicas))
    stats = [layer.balancer.stats() for layer in (captured, launched, plain)]
    return replicas, [(own["microbatches"], own["copies"]) for own in stats]


def test_a_graph_of_the_layer_gives_what_the_layer_gives(four):
    rounds = max(2, ROUNDS // 10)
    for replicas, stats in four.run(4, passes_of_the_layer, rounds, timeout=LONG):
        assert sum(replicas) > 0
        assert stats == [(0, 0), (rounds, sum(replicas)), (rounds, 0)]  # replays are not counted
