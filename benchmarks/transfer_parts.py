"""The transfers of bench_transfer.py: replicas that are sent, gradients that are pulled.

Shapes: C replicas, R ranks, H home experts, P parameters of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from harness import Bench, Mismatch
from timing import Clock

from ultraep import Topology
from ultraep.bundle import Layout
from ultraep.runtime.mapped.peers import LocalPeers

if TYPE_CHECKING:  # kernels are imported late: Triton reads its settings when they are
    from ultraep.backends.triton.signals import Signals

POISON = 0xA5  # byte value of empty slots
TIMEOUT = 5.0  # timeout in seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What one run measures."""

    hidden: int  # of an expert: gate and up [2 * ffn, hidden], down [hidden, ffn], bf16
    ffn: int
    ranks: int  # ranks of the ring
    programs: tuple[int, ...]  # of a rank
    relay_ranks: int
    budgets: tuple[int, ...]  # programs per rank in relays
    fans: tuple[int, ...]  # replicas of one expert; the first is 1
    plan_sizes: tuple[tuple[int, int], ...]  # ranks and experts
    ratios: tuple[float, ...]
    seeds: int
    tokens: int
    numbers: int  # of a gradient
    homes: int  # home experts of the rank that pulls
    pull_fans: tuple[int, ...]
    schedule_sizes: tuple[tuple[int, int], ...]
    meets: tuple[int, ...]
    rounds: int = 21

    @property
    def layout(self) -> Layout:
        """The layout of the two tensors of an expert in a row."""
        shapes = {"gate_up": (2 * self.ffn, self.hidden), "down": (self.hidden, self.ffn)}
        return Layout(tuple((name, shape, torch.bfloat16) for name, shape in shapes.items()))

    @property
    def ring_bytes(self) -> int:
        """Bytes that all ranks of the ring send."""
        return self.ranks * self.layout.nbytes


FULL = Scale(
    hidden=4096,  # Qwen3-235B
    ffn=1536,
    ranks=8,
    programs=(8, 16, 32, 64, 96),
    relay_ranks=16,
    budgets=(2, 4, 8, 16),
    fans=(1, 2, 4, 8, 15),
    plan_sizes=((8, 128), (8, 256), (16, 128), (16, 256), (64, 128), (64, 256)),
    ratios=(1.5, 2.0, 3.0),
    seeds=5,
    tokens=8192,
    numbers=18_874_368,
    homes=8,
    pull_fans=(1, 2, 4, 7),
    schedule_sizes=((8, 128), (64, 256), (256, 1024)),
    meets=(2, 8),
)
TOY = Scale(
    hidden=64,
    ffn=32,
    ranks=4,
    programs=(2, 4),
    relay_ranks=9,
    budgets=(2,),
    fans=(1, 8),
    plan_sizes=((4, 8), (8, 32)),
    ratios=(1.5,),
    seeds=2,
    tokens=64,
    numbers=1000,
    homes=2,
    pull_fans=(1, 2),
    schedule_sizes=((4, 8),),
    meets=(2,),
)


def copy_rate(bench: Bench) -> float:
    """Bytes per microsecond, read and written, of a plain copy of the ring's bytes."""
    size: int = bench.scale.ring_bytes
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=bench.clock.device)
    target = torch.empty_like(source)
    return 2 * size / bench.clock.us(partial(target.copy_, source))


def board_of(group: LocalPeers, rank: int) -> Signals:
    from ultraep.backends.triton.signals import Signals

    return Signals(group.of(rank), slots=1, buffers=1, timeout=TIMEOUT)


def as_replicas(rows: Sequence[Sequence[int]], copies: int, device: torch.device) -> torch.Tensor:
    """[C, 3] expert, host and slot of every replica, in the format of a plan on the device."""
    unused = [[-1, -1, -1]] * (copies - len(rows))
    return torch.tensor([*map(list, rows), *unused], dtype=torch.int32, device=device)


class Neighbours:
    """Ranks of this process on one device, with one home expert and one spare slot each."""

    def __init__(self, ranks: int, bench: Bench) -> None:
        self.topology = Topology(ranks=ranks, experts=ranks, slots=1)
        self.layout, self.device = bench.scale.layout, bench.clock.device
        group = LocalPeers(ranks, self.device)
        self.boards = [board_of(group, rank) for rank in range(ranks)]
        nbytes = self.layout.nbytes
        self.slots = [group.of(rank).allocate("rows", nbytes).local for rank in range(ranks)]
        self.rows = group.of(0).allocate("rows", nbytes)
        self.weights = [
            {name: self._random_bits((1, *shape)) for name, shape, _ in self.layout.parts}
            for _ in range(ranks)
        ]

    def _random_bits(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Random bits; equal numbers are rare."""
        bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=self.device)
        return bits.view(torch.bfloat16)


class Transfer:
    """Replicas (expert, host) of home experts, sent by all ranks in one launch."""

    def __init__(
        self, world: Neighbours, copies: Sequence[tuple[int, int]], *, mode: str, programs: int
    ) -> None:
        from ultraep.backends.triton.streamer import Streamer

        self._world, self._copies = world, copies
        self._streamers = [
            Streamer(board, world.topology, relay=mode, programs=programs) for board in world.boards
        ]
        ranks, first = world.topology.ranks, self._streamers[0]
        rows = [(*copy, 0) for copy in sorted(copies)]
        self._replicas_C3 = as_replicas(rows, first.copies, world.device)
        self._made = torch.zeros(ranks, first.size, dtype=torch.int32, device=world.device)
        sources = [
            streamer.sources(world.layout, weights)
            for streamer, weights in zip(self._streamers, world.weights, strict=True)
        ]
        self._homes, self._parts = torch.stack([homes for homes, _ in sources]), sources[0][1]

    def prepare(self) -> None:
        """Empty the slots and make a new schedule."""
        for slot in self._world.slots:
            slot.fill_(POISON)
        for streamer, made in zip(self._streamers, self._made, strict=True):
            streamer.schedule(self._replicas_C3, self._world.layout, made)

    def launch(self) -> None:
        self._streamers[0].launch(
            self._homes,
            self._parts,
            self._made,
            self._world.layout.nbytes,
            self._world.rows,
            buffer=0,
            first_rank=0,
            ranks=self._world.topology.ranks,
        )

    def time(self, clock: Clock) -> float:
        """Microseconds of the launch; checks the slots after the last one."""
        us = clock.us(self.launch, self.prepare)
        self._world.boards[0].check()
        self._check()
        return us

    @property
    def chunks(self) -> int:
        """Pieces of an expert in the last schedule."""
        return int(self._made[0, 1])

    def _check(self) -> None:
        expert_of_host = {host: expert for expert, host in self._copies}
        for host, slot in enumerate(self._world.slots):
            if host not in expert_of_host:
                same = bool((slot == POISON).all())
            else:
                want = self._world.weights[expert_of_host[host]]
                got = self._world.layout.views(slot[None])
                bits = torch.int16
                same = all(torch.equal(got[n].view(bits), want[n].view(bits)) for n in want)
            if not same:
                raise Mismatch(f"the slot of rank {host} is wrong after sending {self._copies}")


@dataclass(frozen=True, slots=True)
class Copied:
    """Replicas (expert, host) of experts of rank 0, in plan order."""

    name: str
    replicas: tuple[tuple[int, int], ...]

    @property
    def experts(self) -> list[int]:
        return sorted({expert for expert, _ in self.replicas})

    def moved(self, numbers: int, zero: bool) -> int:
        """Bytes moved: home gradients are read and written, replica gradients read (and zeroed)."""
        return 4 * numbers * (2 * len(self.experts) + len(self.replicas) * (2 if zero else 1))


def copied_experts(scale: Scale) -> list[Copied]:
    """One expert with several replicas, and several experts with one each."""
    single = [
        Copied(f"fan {fan}", tuple((0, host) for host in range(1, fan + 1)))
        for fan in scale.pull_fans
    ]
    each = tuple((expert, expert + 1) for expert in range(scale.homes))
    return [*single, Copied(f"{scale.homes} x fan 1", each)]


class Pull:
    """Rank 0 adds up the gradients of its replicas on other ranks."""

    def __init__(self, bench: Bench, programs: int) -> None:
        from ultraep.backends.triton.streamer import Streamer

        scale, device, self._clock = bench.scale, bench.clock.device, bench.clock
        ranks = 1 + max(scale.homes, *scale.pull_fans)
        group = LocalPeers(ranks, device)
        topology = Topology(ranks=ranks, experts=ranks * scale.homes, slots=1)
        self._streamer = Streamer(board_of(group, 0), topology, relay="direct", programs=1)
        self._layout, self._programs = scale.layout, programs
        self._rows = group.of(0).allocate("gradients", 4 * scale.numbers)
        self._gradient_of_host = [
            group.of(rank).allocate("gradients", 4 * scale.numbers).local.view(torch.float32)
            for rank in range(ranks)
        ]
        self._gradients_HP = torch.zeros(scale.homes, scale.numbers, device=device)
        self._fresh_HP = torch.randn(scale.homes, scale.numbers, device=device)
        self._fresh_RP = torch.randn(ranks, scale.numbers, device=device)
        self._made = torch.zeros(self._streamer.size, dtype=torch.int32, device=device)

    def time(self, copied: Copied, zero: bool) -> float:
        """Microseconds of a pull; the sums of the last one are compared."""
        from ultraep.backends.triton.streamer import pull

        rows = [(*copy, 0) for copy in copied.replicas]
        replicas_C3 = as_replicas(rows, self._streamer.copies, self._made.device)
        self._streamer.schedule(replicas_C3, self._layout, self._made)
        arguments = self._gradients_HP, self._rows, self._made, self._streamer
        call = partial(pull, *arguments, programs=self._programs, zero=zero)
        us = self._clock.us(call, partial(self._renew, copied))
        self._check(copied, zero)
        return us

    def _renew(self, copied: Copied) -> None:
        """Restore the gradients to their state before the first pull."""
        for expert in copied.experts:
            self._gradients_HP[expert].copy_(self._fresh_HP[expert])
        for _, host in copied.replicas:
            self._gradient_of_host[host].copy_(self._fresh_RP[host])

    def _check(self, copied: Copied, zero: bool) -> None:
        for expert in copied.experts:
            want = self._fresh_HP[expert].clone()
            for _, host in (copy for copy in copied.replicas if copy[0] == expert):
                want += self._fresh_RP[host]
            if not torch.equal(self._gradients_HP[expert], want):
                raise Mismatch(f"the gradient of expert {expert}: {copied.name}")
        for _, host in copied.replicas:
            left = self._gradient_of_host[host]
            if not (bool((left == 0).all()) if zero else torch.equal(left, self._fresh_RP[host])):
                raise Mismatch(f"the gradient that rank {host} holds: {copied.name}")
