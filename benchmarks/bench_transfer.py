"""Transfers of weights and gradients between ranks, compared with a plain copy.

    python benchmarks/bench_transfer.py                       # needs a GPU; a minute
    python benchmarks/bench_transfer.py --only relay,reduce   # some sections
    python benchmarks/bench_transfer.py --toy                 # tiny, for CI; also without a GPU

All ranks belong to one process on one device, and one launch streams for all of them. This measures
the kernels and the memory of one device, not a link. Every transfer is compared bit by bit with the
expected result: the target is overwritten before each timed launch and read after the last one.

Shapes: C replicas, R ranks, H home experts, P parameters of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from harness import CARD, KERNELS, Bench, Case, Line, Metric, Mismatch, main
from shared_peers import LocalPeers
from timing import Clock, Gpu

from ultraep import Topology
from ultraep.bundle import Layout
from ultraep.hops import MODES

if TYPE_CHECKING:  # kernels are imported late: Triton reads its settings when they are
    from ultraep.backends.triton.signals import Signals

POISON = 0xA5  # byte value of empty slots
TIMEOUT = 5.0  # seconds
Counts = tuple[int, ...]
TIME = Metric("time_p50", "us", "us", ".1f")
RATE = Metric("rate", "TB/s", "TB/s", ".3f")
SHARE = Metric("share_of_copy", "share", "of copy", ".3f")
MODE_TIME = {m: Metric(f"{m}_time_p50", "us", f"{m} us", ".1f") for m in MODES}
MODE_RATIO = {m: Metric(f"{m}_over_fan_out_1", "ratio", "x fan 1", ".2f") for m in MODES}
CHUNKS = Metric("chain_chunks", "chunks", "chunks", ".0f")
SIGNAL = Metric("fitted_cost_of_a_signal", "us", "signal us", ".2f")
FLOOR = Metric("floor", "us", "floor us", ".1f")
OF_FLOOR = Metric("share_of_floor", "share", "of floor", ".3f")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What one run measures."""

    hidden: int = 4096  # of Qwen3-235B: gate and up [2 * ffn, hidden], down [hidden, ffn], bf16
    ffn: int = 1536
    ranks: int = 8  # ranks of the ring
    programs: Counts = (8, 16, 32, 64, 96)  # of a rank
    relay_ranks: int = 16
    budgets: Counts = (2, 4, 8, 16)  # programs per rank in relays
    fans: Counts = (1, 2, 4, 8, 15)  # replicas of one expert; the first is 1
    tokens: int = 8192
    numbers: int = 18_874_368  # of a gradient
    pull_fans: Counts = (1, 2, 4, 7)
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


FULL = Scale()
TOY = Scale(
    hidden=64,
    ffn=32,
    ranks=4,
    programs=(2, 4),
    relay_ranks=9,
    budgets=(2,),
    fans=(1, 8),
    tokens=64,
    numbers=1000,
    pull_fans=(1, 2),
)


# -- sections ------------------------------------------------------------------------------------


def direct(bench: Bench) -> None:
    """Every rank sends one expert to the next rank."""
    scale, lines, plain_rate = bench.scale, [], copy_rate(bench)
    world = Neighbours(scale.ranks, bench)
    ring = [(rank, (rank + 1) % scale.ranks) for rank in range(scale.ranks)]
    for programs in scale.programs:
        us = Transfer(world, ring, mode="direct", programs=programs).time(bench.clock)
        rate = 2 * scale.ring_bytes / us
        case: Case = {"ranks": scale.ranks, "programs": programs}
        lines.append(Line(case, {TIME: us, RATE: rate / 1e6, SHARE: rate / plain_rate}))
    about = f"{scale.ring_bytes / 1e6:.1f} MB in total; programs per rank"
    bench.table(f"direct: each rank sends an expert to the next, {about}", lines)


def relay(bench: Bench) -> None:
    """Send one expert to many ranks: directly, as a chain, and as `auto` chooses."""
    world = Neighbours(bench.scale.relay_ranks, bench)
    lines = []
    for programs in bench.scale.budgets:
        single: dict[str, float] = {}
        for fan in bench.scale.fans:
            values: dict[Metric, float | None] = {SIGNAL: None}
            for mode in MODES:
                placed = [(0, host) for host in range(1, fan + 1)]
                transfer = Transfer(world, placed, mode=mode, programs=programs)
                us = transfer.time(bench.clock)
                single.setdefault(mode, us)
                values |= {MODE_TIME[mode]: us, MODE_RATIO[mode]: us / single[mode]}
                if mode == "chain":
                    values |= {CHUNKS: transfer.chunks}
                    if transfer.chunks > 1 and fan > 1:
                        values[SIGNAL] = signal_us(us, single[mode], transfer.chunks, fan)
            case = {"ranks": world.topology.ranks, "programs": programs, "fan-out": fan}
            lines.append(Line(case, values))
    bench.table("relay: one expert to as many ranks as the fan-out; programs per rank", lines)
    bench.report.note(
        "x fan 1: time over the time of one replica. signal: cost a of a hop\n"
        "besides its bytes, from (n + d - 1) * (u / n + a) for n chunks and d hops."
    )


def signal_us(chain: float, single: float, chunks: int, hop_count: int) -> float:
    """Solve for the cost of a signal, given the times of a chain and of one replica.

    >>> signal_us(chain=(4 + 8 - 1) * (100 / 4 + 2), single=100 + 2, chunks=4, hop_count=8)
    2.0
    """
    return (chain / (chunks + hop_count - 1) - single / chunks) / (1 - 1 / chunks)


def reduce(bench: Bench) -> None:
    """Pull the gradients of replicas and add them in fixed order."""
    clock, scale, lines, plain_rate = bench.clock, bench.scale, [], copy_rate(bench)
    programs = 4 * clock.multiprocessors if isinstance(clock, Gpu) else 2  # of the data plane
    pull = Pull(bench, programs)
    for fan in scale.pull_fans:
        us = pull.time(fan)
        moved = 4 * scale.numbers * (2 + fan)  # bytes read and written
        floor = moved / plain_rate
        case: Case = {"copies": f"fan {fan}", "programs": programs}
        values = {TIME: us, RATE: moved / us / 1e6, FLOOR: floor, OF_FLOOR: floor / us}
        lines.append(Line(case, values))
    bench.table("reduce: fp32 gradients of replicas, pulled", lines)
    bench.report.note(
        f"fan 4: 4 replicas of one expert of {scale.numbers / 1e6:.1f} M numbers. Floor: replica\n"
        "gradients read, home gradient read and written, at the rate of a copy."
    )


# -- transfers -----------------------------------------------------------------------------------


def copy_rate(bench: Bench) -> float:
    """Bytes per microsecond, read and written, of a plain copy of the ring's bytes."""
    size: int = bench.scale.ring_bytes
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=bench.clock.device)
    target = torch.empty_like(source)
    return 2 * size / bench.clock.us(partial(target.copy_, source))


def signals_of(group: LocalPeers, rank: int) -> Signals:
    from ultraep.backends.triton.signals import Signals

    return Signals(group.of(rank), slots=1, buffers=1, timeout=TIMEOUT)


def as_replicas(rows: Sequence[Sequence[int]], count: int, device: torch.device) -> torch.Tensor:
    """[C, 3] expert, host and slot of every replica, in the format of a plan on the device."""
    unused = [[-1, -1, -1]] * (count - len(rows))
    return torch.tensor([*map(list, rows), *unused], dtype=torch.int32, device=device)


class Neighbours:
    """Ranks of this process on one device, with one home expert and one spare slot each."""

    def __init__(self, ranks: int, bench: Bench) -> None:
        self.topology = Topology(ranks=ranks, experts=ranks, slots=1)
        self.layout, self.device = bench.scale.layout, bench.clock.device
        group = LocalPeers(ranks, self.device)
        self.signals = [signals_of(group, rank) for rank in range(ranks)]
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
        self, world: Neighbours, placed: Sequence[tuple[int, int]], *, mode: str, programs: int
    ) -> None:
        from ultraep.backends.triton.streamer import Streamer

        self._world, self._placed = world, placed
        self._streamers = [
            Streamer(signals, world.topology, relay=mode, programs=programs)
            for signals in world.signals
        ]
        ranks, first = world.topology.ranks, self._streamers[0]
        rows = [(*replica, 0) for replica in sorted(placed)]
        self._replicas_C3 = as_replicas(rows, first.max_replicas, world.device)
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
        self._world.signals[0].check()
        self._check()
        return us

    @property
    def chunks(self) -> int:
        """Pieces of an expert in the last schedule."""
        return int(self._made[0, 1])

    def _check(self) -> None:
        expert_of_host = {host: expert for expert, host in self._placed}
        for host, slot in enumerate(self._world.slots):
            if host not in expert_of_host:
                same = bool((slot == POISON).all())
            else:
                want = self._world.weights[expert_of_host[host]]
                got = self._world.layout.views(slot[None])
                bits = torch.int16
                same = all(torch.equal(got[n].view(bits), want[n].view(bits)) for n in want)
            if not same:
                raise Mismatch(f"the slot of rank {host} is wrong after sending {self._placed}")


class Pull:
    """Rank 0 adds up the gradients of the replicas of its expert on other ranks."""

    def __init__(self, bench: Bench, programs: int) -> None:
        from ultraep.backends.triton.streamer import Streamer

        scale, device, self._clock = bench.scale, bench.clock.device, bench.clock
        ranks = 1 + max(scale.pull_fans)
        group = LocalPeers(ranks, device)
        topology = Topology(ranks=ranks, experts=ranks, slots=1)
        self._streamer = Streamer(signals_of(group, 0), topology, relay="direct", programs=1)
        self._layout, self._programs = scale.layout, programs
        self._rows = group.of(0).allocate("gradients", 4 * scale.numbers)
        self._replicas = [
            group.of(rank).allocate("gradients", 4 * scale.numbers).local.view(torch.float32)
            for rank in range(1, ranks)
        ]
        self._home_1P = torch.zeros(1, scale.numbers, device=device)
        self._fresh_RP = torch.randn(ranks, scale.numbers, device=device)
        self._made = torch.zeros(self._streamer.size, dtype=torch.int32, device=device)

    def time(self, fan: int) -> float:
        """Microseconds of a pull from `fan` replicas; the sum of the last one is compared."""
        from ultraep.backends.triton.streamer import pull

        rows = [(0, host, 0) for host in range(1, fan + 1)]
        replicas_C3 = as_replicas(rows, self._streamer.max_replicas, self._made.device)
        self._streamer.schedule(replicas_C3, self._layout, self._made)
        arguments = self._home_1P, self._rows, self._made, self._streamer
        call = partial(pull, *arguments, programs=self._programs)
        us = self._clock.us(call, partial(self._renew, fan))
        self._check(fan)
        return us

    def _renew(self, fan: int) -> None:
        """Restore the gradients to their state before the first pull."""
        self._home_1P.copy_(self._fresh_RP[:1])
        for rank in range(fan):
            self._replicas[rank].copy_(self._fresh_RP[rank + 1])

    def _check(self, fan: int) -> None:
        home, *replicas = self._fresh_RP[: fan + 1]
        if not torch.equal(self._home_1P[0], sum(replicas, start=home)):
            raise Mismatch(f"the sum of {fan} replica gradients")
        for rank, fresh in enumerate(replicas):
            if not torch.equal(self._replicas[rank], fresh):
                raise Mismatch(f"the gradient that rank {rank + 1} holds, of {fan} replicas")


SECTIONS = {"direct": direct, "relay": relay, "reduce": reduce}
# In CARD sections ranks must run concurrently, which the interpreter cannot do.
NEEDS = {"direct": CARD, "relay": CARD, "reduce": KERNELS}


if __name__ == "__main__":
    torch.manual_seed(0)
    scales = {"toy": TOY, "quick": FULL, "full": FULL}
    main("transfer", __doc__, SECTIONS, scales, needs=NEEDS)
