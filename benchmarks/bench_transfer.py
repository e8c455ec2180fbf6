"""Weights and gradients between ranks: how fast, beside a plain copy of as many bytes.

    python benchmarks/bench_transfer.py                       # needs a GPU; two minutes
    python benchmarks/bench_transfer.py --only relay,reduce   # some sections
    python benchmarks/bench_transfer.py --only critical       # needs no GPU
    python benchmarks/bench_transfer.py --toy                 # tiny, for CI; also without a GPU

All ranks are ranks of one process on one device, and one launch streams for all of them: what is
measured is the kernels and the memory of one device, not a link between two. What a link would make
of it is a model, and its table says so. Every transfer is compared, bit by bit, with what it should
bring: before each timed launch its target is overwritten, after the last one it is read.

Shapes: C copies, R ranks, H home experts, P parameters of an expert.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

import harness
import numpy as np
import torch
from bench_control import INNER, captured, nothing_kernel, replay_us, tell
from harness import ORDERED, SHUFFLED, Kind, Line, Metric, Report, Samples, Values

import ultraep
from ultraep import Plan, Topology
from ultraep.bundle import Layout
from ultraep.errors import CommunicationError
from ultraep.replicate import HOME, MODES, Hop, choose, hops
from ultraep.runtime.mapped.peers import LocalPeers

if TYPE_CHECKING:  # kernels are imported late: Triton reads its settings when they are
    from ultraep.backends.triton.board import Board
    from ultraep.backends.triton.streamer import Streamer

Call = Callable[[], object]
Case = dict[str, str | int | float]
REPEATS, WARMUP = 21, 2  # launches that are timed; before them, those that are not
CYCLES = 1_000_000  # half a millisecond in which a launch is queued before the device gets to it
POISON = 0xA5  # byte that a slot holds before it is filled
TIMEOUT = 5.0  # seconds after which a rank that waits gives up
MEETS = 50  # meetings of a graph
LINK_PROGRAMS = 16  # that fill such a link
LINKS = (450.0, 900.0)  # GB/s to one side: NVLink of H100 and H200, of GB200
ENOUGH_OF_COPY, ENOUGH_OF_FLOOR, SLOW_CHAIN = 0.85, 0.70, 1.5  # goals
SWEPT_FAN = 8  # copies of the chain that is cut into more and more chunks

TIME = Metric("time_p50", "us", "us", ".1f")
RATE = Metric("rate", "TB/s", "TB/s", ".3f")
SHARE = Metric("share_of_copy", "share", "of copy", ".3f")
FLOOR = Metric("floor", "us", "floor us", ".1f")
OF_FLOOR = Metric("share_of_floor", "share", "of floor", ".3f")
WALL = Metric("interpreter_time", "us", "interpreter us", ".0f")
MODE_TIME = {m: Metric(f"{m}_time_p50", "us", f"{m} us", ".1f") for m in MODES}
MODE_RATIO = {m: Metric(f"{m}_over_fan_out_1", "ratio", "x fan 1", ".2f") for m in MODES}
CHUNKS = Metric("chain_chunks", "chunks", "chunks", ".0f")
AUTO_CHAIN = Metric("auto_takes_the_chain", "0 or 1", "auto = chain", ".0f")
FITTED = Metric("fitted_time", "us", "fit us", ".1f")
HOP_RATE = Metric("fitted_rate_of_a_hop", "GB/s", "hop GB/s", ".1f")
SIGNAL = Metric("fitted_cost_of_a_signal", "us", "signal us", ".2f")
SIGNAL_BYTES = Metric("fitted_signal_cost", "KiB", "signal KiB", ".1f")
BEST_CHUNKS = Metric("best_chunks", "chunks", "best chunks", ".0f")
CHOSEN_CHUNKS = Metric("chosen_chunks", "chunks", "chosen", ".0f")
CHOSEN_OVER_BEST = Metric("chosen_over_best", "ratio", "chosen / best", ".3f")
MODEL_DIRECT = Metric("model_direct_time", "us", "direct us", ".1f")
MODEL_CHAIN = Metric("model_chain_time", "us", "chain us", ".1f")
MODEL_RATIO = Metric("model_chain_over_fan_out_1", "ratio", "x fan 1", ".2f")
BEFORE = Metric("imbalance_before_mean", "max/mean", "before", ".2f")
COPIES = Metric("copies_mean", "copies", "copies", ".1f")
EGRESS = Metric("egress_max", "experts", "out", ".0f", max)
INGRESS = Metric("ingress_max", "copies", "in", ".0f", max)
LONGEST = Metric("longest_chain_max", "hops", "hops", ".0f", max)
PATHS = (*MODES, "rounds")
PATH = {m: Metric(f"{m}_path_mean", "experts", m, ".2f") for m in PATHS}
WORST_PATH = {m: Metric(f"{m}_path_worst", "experts", "worst", ".2f", max) for m in PATHS}
HOPS = Metric("longest_chain", "hops", "hops", ".0f")
SENT = Metric("hops_sent", "hops", "sent", ".0f")
NODE = Metric("launch_floor", "us", "floor us", ".2f")
SCHEDULE = {m: Metric(f"{m}_graph_time_p50", "us", f"{m} us", ".2f") for m in MODES}
INTERPRETED = {m: Metric(f"{m}_interpreter_time", "us", f"{m} interp. us", ".0f") for m in MODES}
MEETING = Metric("meeting_time", "us", "us", ".2f")


class Mismatch(Exception):
    """Something else arrived than was sent."""


class Tile(NamedTuple):
    """Words (4 bytes) of a tile, and warps of the program that moves it."""

    words: int
    warps: int

    def __str__(self) -> str:
        return f"{self.words} words, {self.warps} warps"


class PullTile(NamedTuple):
    """Numbers of a tile, warps of the program that adds it, copies that are loaded together."""

    numbers: int
    warps: int
    ahead: int

    def __str__(self) -> str:
        return f"{self.numbers} numbers, {self.warps} warps, {self.ahead} ahead"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is measured."""

    hidden: int  # of an expert: gate and up [2 * ffn, hidden], down [hidden, ffn], bf16
    ffn: int
    ranks: int  # of the ring
    programs: tuple[int, ...]  # of a rank
    tiles: tuple[Tile, ...]
    relay_ranks: int
    budgets: tuple[int, ...]  # programs of a rank that relays
    fans: tuple[int, ...]  # copies of one expert; the first is 1
    chunks: tuple[int, ...]
    plan_sizes: tuple[tuple[int, int], ...]  # ranks and experts
    ratios: tuple[float, ...]
    seeds: int
    tokens: int
    numbers: int  # of a gradient
    homes: int  # experts of the rank that pulls
    pull_fans: tuple[int, ...]
    pull_programs: tuple[int, ...]
    pull_tiles: tuple[PullTile, ...]
    schedule_sizes: tuple[tuple[int, int], ...]
    meets: tuple[int, ...]

    @property
    def layout(self) -> Layout:
        """Where the two tensors of an expert stand in a row."""
        shapes = {"gate_up": (2 * self.ffn, self.hidden), "down": (self.hidden, self.ffn)}
        return Layout(tuple((name, shape, torch.bfloat16) for name, shape in shapes.items()))

    @property
    def ring_bytes(self) -> int:
        """What all ranks of the ring send together."""
        return self.ranks * self.layout.nbytes


FULL = Scale(
    hidden=4096,  # Qwen3-235B
    ffn=1536,
    ranks=8,
    programs=(8, 16, 32, 64, 96),
    tiles=(Tile(4096, 4), Tile(8192, 8), Tile(8192, 4), Tile(16384, 8)),
    relay_ranks=16,
    budgets=(2, 4, 8, 16),
    fans=(1, 2, 4, 8, 15),
    chunks=(1, 2, 4, 8, 16, 32, 64),
    plan_sizes=((8, 128), (8, 256), (16, 128), (16, 256), (64, 128), (64, 256)),
    ratios=(1.5, 2.0, 3.0),
    seeds=5,
    tokens=8192,
    numbers=18_874_368,
    homes=8,
    pull_fans=(1, 2, 4, 7),
    pull_programs=(132, 264, 528, 1056),
    pull_tiles=(
        PullTile(4096, 4, 1),
        PullTile(2048, 4, 1),
        PullTile(2048, 4, 3),
        PullTile(4096, 8, 3),
    ),
    schedule_sizes=((8, 128), (64, 256), (256, 1024)),
    meets=(2, 8, 64),
)
QUICK = replace(
    FULL,
    programs=(16, 64),
    tiles=FULL.tiles[:2],
    budgets=(4, 16),
    fans=(1, 2, 8),
    chunks=(1, 4, 16, 64),
    seeds=2,
    pull_fans=(1, 4),
    pull_programs=(528,),
    pull_tiles=FULL.pull_tiles[:3],
    schedule_sizes=((8, 128), (64, 256)),
    meets=(2, 8),
)
TOY = Scale(
    hidden=64,
    ffn=32,
    ranks=4,
    programs=(2, 4),
    tiles=(Tile(256, 4),),
    relay_ranks=9,
    budgets=(2,),
    fans=(1, 8),
    chunks=(1, 4),
    plan_sizes=((4, 8), (8, 32)),
    ratios=(1.5,),
    seeds=2,
    tokens=64,
    numbers=1000,
    homes=2,
    pull_fans=(1, 2),
    pull_programs=(2,),
    pull_tiles=(PullTile(64, 4, 1), PullTile(64, 4, 3)),
    schedule_sizes=((4, 8),),
    meets=(2,),
)


def nothing() -> None:
    pass


class Gpu:
    """Timed by events of the device."""

    def __init__(self) -> None:
        self.name, self.device = torch.cuda.get_device_name(), torch.device("cuda")
        self.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count

    def launch_us(self, call: Call, before: Call = nothing) -> float:
        """Microseconds of one long launch, the median; `before` comes first and is not timed."""
        for _ in range(WARMUP):
            before()
            call()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
        torch.cuda.synchronize()
        for begin, end in events:
            before()
            torch.cuda._sleep(CYCLES)  # else the time in which Python launches it would count
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return float(median(1e3 * begin.elapsed_time(end) for begin, end in events))

    def call_us(self, call: Call) -> float:
        """Microseconds of one short call among many in a graph, the median."""
        return replay_us(captured(call, INNER)[0]) / INNER

    def floor_us(self) -> float:
        """Microseconds of a kernel that does nothing, in a graph."""
        target = torch.zeros(1, dtype=torch.int32, device=self.device)
        return self.call_us(partial(nothing_kernel()[(1,)], target, num_warps=1))


class Host:
    """Timed by the clock on the wall: copies of the host, and Triton's interpreter."""

    def __init__(self) -> None:
        self.name, self.device = "Triton interpreter", torch.device("cpu")

    def launch_us(self, call: Call, before: Call = nothing) -> float:
        seconds = []
        for _ in range(4):
            before()
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return 1e6 * median(seconds[1:])

    def call_us(self, call: Call) -> float:
        return self.launch_us(call)


Clock = Gpu | Host


@dataclass(slots=True)
class Bench:
    """What all sections share: where lines go, how much is measured, and how fast a copy is."""

    report: Report
    scale: Scale
    clock: Clock
    _copy_us: dict[int, float] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.clock.device

    def copy_us(self, size: int) -> float:
        """Microseconds of a copy of so many bytes within the device."""
        if size not in self._copy_us:
            source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=self.device)
            target = torch.empty_like(source)
            before = partial(target.fill_, POISON)
            self._copy_us[size] = self.clock.launch_us(partial(target.copy_, source), before)
            if not torch.equal(source, target):
                raise Mismatch(f"a copy of {size} bytes")
        return self._copy_us[size]

    @property
    def copy_rate(self) -> float:
        """Bytes per microsecond, read and written, of a copy of all that the ring sends."""
        return 2 * self.scale.ring_bytes / self.copy_us(self.scale.ring_bytes)


def copy(bench: Bench) -> None:
    """The floor of the other sections."""
    lines = []
    for experts in (1, bench.scale.ranks):
        size = experts * bench.scale.layout.nbytes
        us = bench.copy_us(size)
        case = {"experts": experts, "MB": round(size / 1e6, 3)}
        lines.append(Line(case, {TIME: us, RATE: 2e-6 * size / us}))
    bench.report.add(
        "copy: tensor.copy_ within the device; TB/s count bytes read and written", lines
    )
    bench.report.note(
        f"The last line is the floor of the sections direct and reduce: {_tera(bench.copy_rate)}."
    )


class World:
    """Ranks of this process on one device; each has one home expert and one spare slot."""

    def __init__(self, ranks: int, bench: Bench) -> None:
        self.topology = Topology(ranks=ranks, experts=ranks, slots=1)
        self.layout, self.device = bench.scale.layout, bench.device
        group = LocalPeers(ranks, self.device)
        self.boards = [board_of(group, rank) for rank in range(ranks)]
        nbytes = self.layout.nbytes
        self.slots = [group.of(rank).allocate("rows", nbytes).local for rank in range(ranks)]
        self.rows = group.of(0).allocate("rows", nbytes)
        self.weights = [
            {name: random_bits((1, *shape), self.device) for name, shape, _ in self.layout.parts}
            for _ in range(ranks)
        ]

    def streamers(self, mode: str, programs: int) -> list[Streamer]:
        from ultraep.backends.triton.streamer import Streamer

        return [
            Streamer(board, self.topology, relay=mode, programs=programs) for board in self.boards
        ]


def board_of(group: LocalPeers, rank: int) -> Board:
    from ultraep.backends.triton.board import Board

    return Board(group.of(rank), slots=1, buffers=1, timeout=TIMEOUT)


def random_bits(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Numbers of every kind: two of them are rarely alike."""
    bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device)
    return bits.view(torch.bfloat16)


def as_replicas(rows: Sequence[Sequence[int]], copies: int, device: torch.device) -> torch.Tensor:
    """[C, 3] expert, host and slot of every copy, as a plan on the device has them."""
    nobody = [[-1, -1, -1]] * (copies - len(rows))
    return torch.tensor([*map(list, rows), *nobody], dtype=torch.int32, device=device)


@contextmanager
def tiled(tile: Tile) -> Iterator[None]:
    """The streamer moves tiles of this size."""
    from ultraep.backends.triton import streamer

    with patch.multiple(streamer, WORDS=tile.words, WARPS=tile.warps):
        yield


class Transfer:
    """Copies of home experts (expert, host), sent by all ranks in one launch.

    chunks: pieces of an expert; None: as the streamer chooses.
    """

    def __init__(
        self,
        world: World,
        copies: Sequence[tuple[int, int]],
        *,
        mode: str,
        programs: int,
        chunks: int | None = None,
    ) -> None:
        self._world, self._copies = world, copies
        self._streamers, layout = world.streamers(mode, programs), world.layout
        ranks, first = world.topology.ranks, self._streamers[0]
        if chunks is not None:
            of_length = torch.full((ranks + 1,), chunks, dtype=torch.int32, device=world.device)
            for streamer in self._streamers:
                streamer._chunks[layout.nbytes] = of_length
        rows = [(*copy, 0) for copy in sorted(copies)]
        self._replicas_C3 = as_replicas(rows, first.copies, world.device)
        self._made = torch.zeros(ranks, first.size, dtype=torch.int32, device=world.device)
        sources = [
            streamer.sources(layout, weights)
            for streamer, weights in zip(self._streamers, world.weights, strict=True)
        ]
        self._homes, self._parts = torch.stack([homes for homes, _ in sources]), sources[0][1]

    def prepare(self) -> None:
        """Nothing is in the slots, and a new schedule with a new number fills them."""
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
        """Microseconds of the launch; what the last one brought is compared."""
        us = clock.launch_us(self.launch, self.prepare)
        self._world.boards[0].check()
        self._check()
        return us

    @property
    def chunks(self) -> int:
        """Of the last schedule."""
        return int(self._made[0, 1])

    @property
    def longest(self) -> int:
        """Hops of the longest chain of the last schedule."""
        return int(self._made[0, 3])

    def _check(self) -> None:
        expert_of_host = {host: expert for expert, host in self._copies}
        for host, slot in enumerate(self._world.slots):
            if host not in expert_of_host:
                same = bool((slot == POISON).all())
            else:
                want = self._world.weights[expert_of_host[host]]
                got = self._world.layout.views(slot[None])
                same = all(_same_bits(got[name], want[name]) for name in want)
            if not same:
                raise Mismatch(f"the slot of rank {host} after {self._copies}")


def _same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), two.view(torch.int16))


def direct(bench: Bench) -> None:
    """Every rank sends its expert to the next rank."""
    scale, lines = bench.scale, []
    world = World(scale.ranks, bench)
    ring = [(rank, (rank + 1) % scale.ranks) for rank in range(scale.ranks)]
    for tile, programs in product(scale.tiles, scale.programs):
        tell(f"direct: {programs} programs, tiles of {tile}")
        with tiled(tile):
            us = Transfer(world, ring, mode="direct", programs=programs).time(bench.clock)
        rate = 2 * scale.ring_bytes / us
        case: Case = {"ranks": scale.ranks, "tile": str(tile), "programs": programs}
        values: Values = {TIME: us, RATE: rate / 1e6, SHARE: rate / bench.copy_rate}
        lines.append(Line(case, values))
    bench.report.add(
        f"direct: each rank sends an expert to the next, {scale.ring_bytes / 1e6:.1f} MB in all; "
        "programs of a rank",
        lines,
    )
    best = max(lines, key=_share)
    bench.report.note(
        f"Floor: a copy of as many bytes in {bench.copy_us(scale.ring_bytes):.1f} us, "
        f"{_tera(bench.copy_rate)}. Best: {_share(best):.3f} of it with {best.case['programs']} "
        f"programs, {best.case['tile']}; goal {ENOUGH_OF_COPY}: "
        f"{_verdict(_share(best) >= ENOUGH_OF_COPY)}.\n"
        "All programs share the device. If it cannot hold them all at once, some start late."
    )


def _share(line: Line) -> float:
    return line.values[SHARE] or 0.0


def _tera(rate: float) -> str:
    return f"{rate / 1e6:.2f} TB/s read and written"


def _verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"


def relay(bench: Bench) -> None:
    """One expert to many ranks: by its home alone, handed on from rank to rank, and as chosen."""
    scale = bench.scale
    world = World(scale.relay_ranks, bench)
    lines = [line for budget in scale.budgets for line in _fan_outs(bench, world, budget)]
    bench.report.add(
        "relay: one expert to as many ranks as the fan-out says; programs of a rank", lines
    )
    far = {
        line.case["programs"]: ratio
        for line in lines
        if line.case["fan-out"] == SWEPT_FAN and (ratio := line.values[MODE_RATIO["chain"]])
    }
    bench.report.note(
        "x fan 1: time over that of one copy with as many programs; at best 1, whatever the "
        "fan-out.\nDirect sends the expert that often, one after the other, so x fan 1 is about "
        f"the fan-out. Goal for a chain of {SWEPT_FAN}: at most {SLOW_CHAIN}. "
        + "; ".join(f"{p} programs: {r:.2f}, {_verdict(r <= SLOW_CHAIN)}" for p, r in far.items())
        + "."
    )
    alone = [line.values[MODE_TIME["chain"]] or 0.0 for line in lines if line.case["fan-out"] == 1]
    fits = [_chunk_sweep(bench, world, *one) for one in zip(scale.budgets, alone, strict=True)]
    swept, found, signals = zip(*fits, strict=True)
    bench.report.add(
        "relay: the chain, cut into more and more chunks",
        [line for table in swept for line in table],
    )
    bench.report.note(
        "fit us: (n + d - 1) * (S / (n * B) + a) with n chunks, d hops, S bytes of an expert; B "
        "and a, the rate of a hop and the cost of a signal, are fitted to the times of each budget."
    )
    bench.report.add("relay: the fit, and the chunks that the streamer chooses", list(found))
    bench.report.note(
        "signal KiB: what a program moves meanwhile, B * a / programs; the streamer takes "
        f"{_signal_cost() / 2**10:.3g} KiB for it (SIGNAL_COST)."
    )
    _links(bench, max(0.0, signals[-1]), scale.budgets[-1])


def _fan_outs(bench: Bench, world: World, programs: int) -> list[Line]:
    """All fan-outs and modes with as many programs of a rank."""
    lines: list[Line] = []
    single: dict[str, float] = {}
    tell(f"relay: {programs} programs of each rank")
    for fan in bench.scale.fans:
        copies = [(0, host) for host in range(1, fan + 1)]
        values: dict[Metric, float | None] = {}
        for mode in MODES:
            transfer = Transfer(world, copies, mode=mode, programs=programs)
            us = transfer.time(bench.clock)
            single.setdefault(mode, us)
            values |= {MODE_TIME[mode]: us, MODE_RATIO[mode]: us / single[mode]}
            if mode == "chain":
                values[CHUNKS] = transfer.chunks
            if mode == "auto":
                values[AUTO_CHAIN] = int(transfer.longest > 1)
        case = {"ranks": world.topology.ranks, "programs": programs, "fan-out": fan}
        lines.append(Line(case, values))
    return lines


def _chunk_sweep(
    bench: Bench, world: World, programs: int, alone: float
) -> tuple[list[Line], Line, float]:
    """A line for every number of chunks, one for the fit, and what a signal costs."""
    from ultraep.backends.triton.streamer import chunks_for

    nbytes, fan = world.layout.nbytes, SWEPT_FAN
    chosen = chunks_for(fan, nbytes, programs)
    copies = [(0, host) for host in range(1, fan + 1)]
    us_of_chunks = {}
    tell(f"relay: chunks, {programs} programs of each rank")
    for chunks in sorted({*bench.scale.chunks, chosen}):
        transfer = Transfer(world, copies, mode="chain", programs=programs, chunks=chunks)
        us_of_chunks[chunks] = transfer.time(bench.clock)
    rate, signal = fitted(us_of_chunks, fan, nbytes)
    case = {"ranks": world.topology.ranks, "fan-out": fan, "programs": programs}
    lines = [
        Line(
            case | {"chunks": chunks},
            {
                MODE_TIME["chain"]: us,
                MODE_RATIO["chain"]: us / alone,
                FITTED: chain_us(chunks, fan, nbytes, rate, signal),
            },
        )
        for chunks, us in us_of_chunks.items()
    ]
    best = min(us_of_chunks, key=us_of_chunks.__getitem__)
    values: Values = {
        HOP_RATE: rate / 1e3,
        SIGNAL: signal,
        SIGNAL_BYTES: rate * signal / programs / 2**10,
        BEST_CHUNKS: best,
        CHOSEN_CHUNKS: chosen,
        CHOSEN_OVER_BEST: us_of_chunks[chosen] / us_of_chunks[best],
    }
    return lines, Line(case, values), signal


def fitted(us_of_chunks: dict[int, float], hops: int, nbytes: int) -> tuple[float, float]:
    """Bytes per microsecond of a hop, and microseconds of a signal; least squares of the shares."""
    chunks, us = (
        np.array(values, dtype=np.float64) for values in zip(*us_of_chunks.items(), strict=True)
    )
    rounds = chunks + hops - 1
    terms = np.stack([rounds * nbytes / chunks, rounds], axis=1) / us[:, None]
    slowness, signal = np.linalg.lstsq(terms, np.ones(len(us)), rcond=None)[0]
    return 1 / max(float(slowness), 1e-12), float(signal)


def chain_us(chunks: int, hops: int, nbytes: int, rate: float, signal: float) -> float:
    """Microseconds of a chain: all chunks pass all hops, one round after the other."""
    return (chunks + hops - 1) * (nbytes / (chunks * rate) + signal)


def _signal_cost() -> int:
    from ultraep.backends.triton.streamer import SIGNAL_COST

    return SIGNAL_COST


def _links(bench: Bench, signal: float, programs: int) -> None:
    """What the fitted cost of a signal means for links between devices: a model."""
    from ultraep.backends.triton.board import MAX_CHUNKS

    nbytes, lines = bench.scale.layout.nbytes, []
    for link, fan in product(LINKS, bench.scale.fans):
        rate = 1e3 * link
        single = chain_us(1, 1, nbytes, rate, signal)
        times = {n: chain_us(n, fan, nbytes, rate, signal) for n in range(1, MAX_CHUNKS + 1)}
        best = min(times, key=times.__getitem__)
        values: Values = {
            MODEL_DIRECT: fan * nbytes / rate + signal,
            MODEL_CHAIN: times[best],
            BEST_CHUNKS: best,
            MODEL_RATIO: times[best] / single,
        }
        lines.append(Line({"link GB/s": link, "fan-out": fan}, values))
    bench.report.add(
        f"relay: MODEL, not measured: the same over links, with a signal of {signal:.2f} us", lines
    )
    bench.report.note(
        "450 GB/s to one side: NVLink of H100 and H200; 900: of GB200. The cost of a signal is the "
        f"one fitted for {programs} programs within one device; a link adds its own latency."
    )


def critical(bench: Bench) -> None:
    """Real plans: what the busiest rank has to send, in experts."""
    scale, nbytes = bench.scale, FULL.layout.nbytes
    for family in (ORDERED, SHUFFLED):
        samples = Samples()
        tell(f"critical: {family}")
        for (ranks, experts), ratio in product(scale.plan_sizes, scale.ratios):
            topology = Topology(ranks=ranks, experts=experts, slots=1)
            case: Case = {"load": family, "slots": 1, "ranks": ranks, "experts": experts}
            for seed in range(scale.seeds):
                loads = Kind(family, ratio).draw(ranks, experts, tokens=scale.tokens, seed=seed)
                plan = ultraep.plan(loads, topology, backend="cpu")
                samples.add(case | {"ratio": ratio}, _paths(plan, nbytes))
        title = f"critical path, in experts of {nbytes / 1e6:.1f} MB; {scale.seeds} seeds"
        bench.report.add(title, samples.lines())
    bench.report.note(
        "out: different experts that the busiest home gives away; in: copies that a rank receives; "
        "hops: the longest chain; the most of all seeds. Paths: mean and worst of the seeds.\n"
        "direct: copies that the busiest rank sends, all from their home. chain: hops that the "
        "busiest rank sends, its own and those it hands on, and (d - 1) / n for d hops in n "
        "chunks, as the streamer cuts them. auto: the shorter of the two, plan by plan.\n"
        "rounds: the chain counted round by round, the most chunks of a rank in each; over n.\n"
        "Floor: 1, as soon as there is a copy."
    )


def _paths(plan: Plan, nbytes: int) -> Values:
    from ultraep.backends.triton.streamer import chunks_for

    ways = {mode: hops(plan, mode) for mode in ("direct", "chain")}
    longest = max((hop.depth + 1 for hop in ways["chain"]), default=0)
    chunks = chunks_for(longest, nbytes, LINK_PROGRAMS)
    path = {mode: float(_most_sent(way)) for mode, way in ways.items()}
    path["chain"] += max(0, longest - 1) / chunks
    path["auto"] = path[choose(plan, chunks)]
    path["rounds"] = _by_rounds(ways["chain"], chunks, longest)
    values: dict[Metric, float | None] = {
        BEFORE: plan.initial_imbalance,
        COPIES: plan.num_replicas,
        EGRESS: plan.max_egress,
        INGRESS: plan.max_ingress,
        LONGEST: longest,
    }
    for name in PATHS:
        values |= {PATH[name]: path[name], WORST_PATH[name]: path[name]}
    return values


def _by_rounds(way: Sequence[Hop], chunks: int, longest: int) -> float:
    """Chunk c of a hop at depth d goes in round c + d, as long as the busiest rank of it takes."""
    rounds = [
        [hop for hop in way if 0 <= moment - hop.depth < chunks]
        for moment in range(chunks + longest - 1)
    ]
    return sum(map(_most_sent, rounds)) / chunks


def _most_sent(way: Sequence[Hop]) -> int:
    return max(Counter(hop.sender for hop in way).values(), default=0)


@dataclass(frozen=True, slots=True)
class Copied:
    """Experts of rank 0 that were copied: (expert, host) of every copy, as the plan has them."""

    head: str
    name: str
    copies: tuple[tuple[int, int], ...]

    @property
    def experts(self) -> list[int]:
        return sorted({expert for expert, _ in self.copies})

    def moved(self, numbers: int, zero: bool) -> int:
        """Bytes: gradients of homes are read and written, those of copies read, and zeroed."""
        return 4 * numbers * (2 * len(self.experts) + len(self.copies) * (2 if zero else 1))


def copied_experts(scale: Scale) -> list[Copied]:
    """One expert with several copies, and several experts with one each."""
    found = [
        Copied(f"fan {fan}", f"fan_out_{fan}", tuple((0, host) for host in range(1, fan + 1)))
        for fan in scale.pull_fans
    ]
    each = tuple((expert, expert + 1) for expert in range(scale.homes))
    return [*found, Copied(f"{scale.homes} x fan 1", f"{scale.homes}_experts_fan_out_1", each)]


class Pull:
    """Rank 0 adds up the gradients of its experts that other ranks hold."""

    def __init__(self, bench: Bench) -> None:
        from ultraep.backends.triton.streamer import Streamer

        scale, self._clock = bench.scale, bench.clock
        ranks = 1 + max(scale.homes, *scale.pull_fans)
        group, device = LocalPeers(ranks, bench.device), bench.device
        topology = Topology(ranks=ranks, experts=ranks * scale.homes, slots=1)
        self._streamer = Streamer(board_of(group, 0), topology, relay="direct", programs=1)
        self._numbers, self._layout = scale.numbers, scale.layout
        self._rows = group.of(0).allocate("gradients", 4 * scale.numbers)
        self._gradient_of_host = [
            group.of(rank).allocate("gradients", 4 * scale.numbers).local.view(torch.float32)
            for rank in range(ranks)
        ]
        self._gradients_HP = torch.zeros(scale.homes, scale.numbers, device=device)
        self._fresh_HP = torch.randn(scale.homes, scale.numbers, device=device)
        self._fresh_RP = torch.randn(ranks, scale.numbers, device=device)
        self._made = torch.zeros(self._streamer.size, dtype=torch.int32, device=device)

    def plan(self, copied: Copied) -> None:
        """What is pulled from now on."""
        self._copied = copied
        rows = [(*copy, 0) for copy in copied.copies]
        replicas_C3 = as_replicas(rows, self._streamer.copies, self._made.device)
        self._streamer.schedule(replicas_C3, self._layout, self._made)
        self._want_HP = self._fresh_HP.clone()
        for expert, host in copied.copies:
            self._want_HP[expert] += self._fresh_RP[host]

    def time(self, tile: PullTile, programs: int, zero: bool) -> float:
        """Microseconds of a pull; what the last one added up is compared."""
        from ultraep.backends.triton import reducer

        pull = partial(
            reducer.pull,
            self._gradients_HP,
            self._rows,
            self._made,
            self._streamer,
            programs=programs,
            zero=zero,
        )
        with patch.multiple(reducer, NUMBERS=tile.numbers, WARPS=tile.warps, AHEAD=tile.ahead):
            us = self._clock.launch_us(pull, self._renew)
        self._check(zero)
        return us

    def _renew(self) -> None:
        """Gradients as they were before the first pull."""
        for expert in self._copied.experts:
            self._gradients_HP[expert].copy_(self._fresh_HP[expert])
        for _, host in self._copied.copies:
            self._gradient_of_host[host].copy_(self._fresh_RP[host])

    def _check(self, zero: bool) -> None:
        for expert in self._copied.experts:
            if not torch.equal(self._gradients_HP[expert], self._want_HP[expert]):
                raise Mismatch(f"the gradient of expert {expert}: {self._copied.head}")
        for _, host in self._copied.copies:
            left = self._gradient_of_host[host]
            if not (bool((left == 0).all()) if zero else torch.equal(left, self._fresh_RP[host])):
                raise Mismatch(f"the gradient that rank {host} holds: {self._copied.head}")


Setting = tuple[PullTile, int]  # and programs
Pulls = dict[tuple[Copied, bool, Setting], float]  # microseconds, with zeros left behind or not


def reduce(bench: Bench) -> None:
    """Gradients of copies, pulled by the home and added in fixed order."""
    from ultraep.backends.triton import reducer

    scale, clock = bench.scale, bench.clock
    settings = list(product(scale.pull_tiles, scale.pull_programs))
    if not isinstance(clock, Gpu):
        plain = [
            setting for setting in settings if setting[0].ahead == 1
        ]  # it cannot do the masks of 3
        bench.report.add("reduce: gradients, pulled", _interpreted(_pulls(bench, plain)))
        return
    # The data plane starts four programs on every multiprocessor.
    shipped = PullTile(reducer.NUMBERS, reducer.WARPS, reducer.AHEAD), 4 * clock.multiprocessors
    settings = list(dict.fromkeys([*settings, shipped]))
    us = _pulls(bench, settings)
    for zero in (False, True):
        title = "reduce: share of the floor" + (", when zeros are left behind" if zero else "")
        bench.report.add(title, _pull_sweep(bench, us, settings, zero))
    lines = _pull_choices(bench, us, settings, shipped)
    bench.report.add("reduce: as shipped, and the best of the sweep", lines)
    worst = {
        name: min(line.values[OF_FLOOR] or 0.0 for line in lines if line.case["setting"] == name)
        for name in ("shipped", "best")
    }
    reached = [
        f"{name} {share:.3f} at worst, {_verdict(share >= ENOUGH_OF_FLOOR)}"
        for name, share in worst.items()
    ]
    bench.report.note(
        f"fan 4: 4 copies of one expert of {scale.numbers / 1e6:.1f} M numbers, fp32. Floor: the "
        "gradients of copies read, those of homes read and written, zeros written, at the rate of "
        f"the copy, {_tera(bench.copy_rate)}.\n"
        f"Goal {ENOUGH_OF_FLOOR} of the floor: {'; '.join(reached)}."
    )


def _pulls(bench: Bench, settings: Sequence[Setting]) -> Pulls:
    pull, us = Pull(bench), {}
    for copied in copied_experts(bench.scale):
        tell(f"reduce: {copied.head}")
        pull.plan(copied)
        for zero, setting in product((False, True), settings):
            us[copied, zero, setting] = pull.time(*setting, zero)
    return us


def _pull_case(zero: bool, setting: Setting) -> Case:
    tile, programs = setting
    return {"zeros": "yes" if zero else "no", "tile": str(tile), "programs": programs}


def _interpreted(us: Pulls) -> list[Line]:
    return [
        Line({"copies": copied.head} | _pull_case(zero, setting), {WALL: took})
        for (copied, zero, setting), took in us.items()
    ]


def _pull_sweep(bench: Bench, us: Pulls, settings: Sequence[Setting], zero: bool) -> list[Line]:
    """A line for every setting, a column for every number of copies."""
    lines = []
    for setting in settings:
        values: dict[Metric, float | None] = {}
        for copied in copied_experts(bench.scale):
            metric = Metric(f"share_of_floor_{copied.name}", "share", copied.head, ".3f")
            floor = copied.moved(bench.scale.numbers, zero) / bench.copy_rate
            values[metric] = floor / us[copied, zero, setting]
        lines.append(Line(_pull_case(zero, setting), values))
    return lines


def _pull_choices(
    bench: Bench, us: Pulls, settings: Sequence[Setting], shipped: Setting
) -> list[Line]:
    lines = []
    for copied, zero in product(copied_experts(bench.scale), (False, True)):
        moved = copied.moved(bench.scale.numbers, zero)
        floor = moved / bench.copy_rate
        times = {setting: us[copied, zero, setting] for setting in settings}
        best = min(times, key=times.__getitem__)
        for name, setting in (("shipped", shipped), ("best", best)):
            took = times[setting]
            case: Case = {"copies": copied.head, "setting": name}
            values: Values = {
                TIME: took,
                RATE: moved / took / 1e6,
                FLOOR: floor,
                OF_FLOOR: floor / took,
            }
            lines.append(Line(case | _pull_case(zero, setting), values))
    return lines


def schedule(bench: Bench) -> None:
    """The kernel that makes of a plan what one rank has to do."""
    metrics = SCHEDULE if isinstance(bench.clock, Gpu) else INTERPRETED
    floor = bench.clock.floor_us() if isinstance(bench.clock, Gpu) else None
    lines = []
    for ranks, experts in bench.scale.schedule_sizes:
        tell(f"schedule: {ranks} ranks, {experts} experts")
        topology = Topology(ranks=ranks, experts=experts, slots=1)
        ratio = min(3.0, max(bench.scale.ratios))
        loads = Kind(SHUFFLED, ratio).draw(ranks, experts, tokens=bench.scale.tokens, seed=0)
        plan = ultraep.plan(loads, topology, backend="cpu")
        chain = hops(plan, "chain")
        busiest, sent = Counter(hop.sender for hop in chain).most_common(1)[0]
        board = board_of(LocalPeers(ranks, bench.device), busiest)
        values: dict[Metric, float | None] = {
            COPIES: plan.num_replicas,
            HOPS: max((hop.depth + 1 for hop in chain), default=0),
            SENT: sent,
        }
        for mode in MODES:
            values[metrics[mode]] = _schedule_us(bench, board, plan, mode)
        case: Case = {"ranks": ranks, "experts": experts, "load": f"{SHUFFLED} {ratio:g}"}
        lines.append(Line(case, values | {NODE: floor}))
    bench.report.add("schedule: from a plan to the hops of its busiest rank, in a graph", lines)
    bench.report.note(
        "hops: of the longest chain; sent: hops of that rank, in chains.\n"
        "Floor: a kernel that does nothing, in a graph like theirs."
    )


def _schedule_us(bench: Bench, board: Board, plan: Plan, mode: str) -> float:
    """Of one mode; the result is compared with the twin's."""
    from ultraep.backends.triton.streamer import Streamer, chunks_for

    streamer = Streamer(board, plan.topology, relay=mode, programs=1)
    replicas_C3 = as_replicas(plan.replicas.tolist(), streamer.copies, bench.device)
    made = torch.zeros(streamer.size, dtype=torch.int32, device=bench.device)
    layout = bench.scale.layout
    us = bench.clock.call_us(partial(streamer.schedule, replicas_C3, layout, made))
    longest = max((hop.depth + 1 for hop in hops(plan, "chain")), default=0)
    want = _sent(plan, mode, chunks_for(longest, layout.nbytes, 1), board.peers.rank)
    got = made.tolist()
    if sorted(tuple(got[4 * i + 4 : 4 * i + 8]) for i in range(got[0])) != want:
        raise Mismatch(f"the schedule of rank {board.peers.rank}, {mode}, {plan.topology}")
    return us


def _sent(plan: Plan, mode: str, chunks: int, rank: int) -> list[tuple[int, ...]]:
    """Source, receiver, slot and depth of the hops of a rank, as in a schedule."""
    mine = plan.topology.home_experts(rank)
    found = []
    for hop in hops(plan, mode, chunks=chunks):
        if hop.sender == rank:
            index = int(np.searchsorted(mine, hop.expert))
            source = index if hop.sender_slot == HOME else -1 - hop.sender_slot
            found.append((source, hop.receiver, hop.slot, hop.depth))
    return sorted(found)


def meet(bench: Bench) -> None:
    """All ranks wait for each other, again and again, each in a graph on a stream of its own."""
    lines, most = [], int(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])
    at_once = [ranks for ranks in bench.scale.meets if ranks < min(most, 16)]
    for ranks in at_once:
        tell(f"meet: {ranks} ranks")
        lines.append(Line({"ranks": ranks}, {MEETING: meeting_us(ranks, bench)}))
    bench.report.add("meet: one meeting of all ranks, within one device", lines)
    skipped = [ranks for ranks in bench.scale.meets if ranks not in at_once]
    if skipped:
        bench.report.note(
            f"Not measured: {', '.join(map(str, skipped))} ranks. All must run at once, each on a "
            "stream of its own, and one device does not promise that for so many."
        )


def meeting_us(ranks: int, bench: Bench) -> float:
    """From graphs of two lengths: what else a replay costs is in both."""
    group = LocalPeers(ranks, bench.device)
    boards = [board_of(group, rank) for rank in range(ranks)]
    streams = [torch.cuda.Stream() for _ in boards]

    def together(calls: Sequence[Call]) -> None:
        main = torch.cuda.current_stream()
        for stream, call in zip(streams, calls, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                call()
        for stream in streams:
            main.wait_stream(stream)

    def graphs(meetings: int) -> list[Call]:
        made: list[Call] = []
        for stream, board in zip(streams, boards, strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(meetings):
                    board.meet("rows")
            made.append(graph.replay)
        return made

    together([partial(board.meet, "rows") for board in boards])
    torch.cuda.synchronize()
    boards[0].check()
    short, long = graphs(MEETS), graphs(3 * MEETS)
    us = [bench.clock.launch_us(partial(together, calls)) for calls in (short, long)]
    boards[0].check()
    return (us[1] - us[0]) / (2 * MEETS)


SECTIONS = {
    "copy": copy,
    "direct": direct,
    "relay": relay,
    "critical": critical,
    "reduce": reduce,
    "schedule": schedule,
    "meet": meet,
}
AT_ONCE = ("direct", "relay", "meet")  # the interpreter runs one program after the other
KERNELS = ("reduce", "schedule")  # which it runs, but slowly


def missing(section: str, options: argparse.Namespace) -> str:
    """Why a section cannot run without a GPU; nothing if it can."""
    if section in AT_ONCE:
        return "needs a GPU: its ranks must run at once, which the interpreter does not"
    if section in KERNELS and not options.toy:
        return "needs a GPU; without one, only --toy runs it (Triton's interpreter)"
    return ""


def main(argv: Sequence[str]) -> None:
    """Run the sections, print their tables, and write their rows."""
    options = _options(argv[1:])
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # streams that run at once
    gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    if not gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported
        torch.set_num_threads(1)
    torch.manual_seed(0)
    clock: Clock = Gpu() if gpu else Host()
    report = Report("transfer", argv, device=f"{clock.name}; host {harness.cpu_device()}")
    report.header()
    bench = Bench(report, TOY if options.toy else QUICK if options.quick else FULL, clock)
    failures = []
    for name in options.only:
        if not gpu and (why := missing(name, options)):
            report.note(f"\n{name}: {why}")
            continue
        report.section = name
        tell(name)
        try:
            SECTIONS[name](bench)
        except (Mismatch, CommunicationError) as error:
            failures.append(f"{name}: {error}")
            report.note(f"\n{name} FAILED: {error}")
        if options.json:
            report.write(options.json)  # after every section: a run that is cut short leaves some
    tell("done")
    if failures:
        raise SystemExit("\n".join(failures))
    if not report.rows:
        raise SystemExit(f"nothing of {', '.join(options.only)} could be measured here")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    harness.common_options(parser)
    harness.section_option(parser, SECTIONS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv)
