"""Stage 3 of bench_transfer.py: copies of experts in a ring, and relays from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from harness import Case, Line, Metric, Mismatch, Values
from timing import Clock, tell
from transfer_scale import POISON, RATE, TIME, TransferBench, as_replicas, board_of, tera, verdict

from ultraep import Topology
from ultraep.hops import MODES
from ultraep.runtime.mapped.peers import LocalPeers

LINKS = (450.0, 900.0)  # GB/s to one side: NVLink of H100 and H200, of GB200
ENOUGH_OF_COPY, SLOW_CHAIN = 0.85, 1.5  # goals
SWEPT_FAN = 8  # copies of the chain that is cut into more and more chunks

SHARE = Metric("share_of_copy", "share", "of copy", ".3f")
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


class Neighbours:
    """Ranks of this process on one device; each has one home expert and one spare slot."""

    def __init__(self, ranks: int, bench: TransferBench) -> None:
        self.topology = Topology(ranks=ranks, experts=ranks, slots=1)
        self.layout, self.device = bench.scale.layout, bench.clock.device
        group = LocalPeers(ranks, self.device)
        self.boards = [board_of(group, rank) for rank in range(ranks)]
        nbytes = self.layout.nbytes
        self.slots = [group.of(rank).allocate("rows", nbytes).local for rank in range(ranks)]
        self.rows = group.of(0).allocate("rows", nbytes)
        self.weights = [
            {name: random_bits((1, *shape), self.device) for name, shape, _ in self.layout.parts}
            for _ in range(ranks)
        ]


def random_bits(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Numbers of every kind: two of them are rarely alike."""
    bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device)
    return bits.view(torch.bfloat16)


class Transfer:
    """Copies of home experts (expert, host), sent by all ranks in one launch.

    chunks: pieces of an expert; None: as the streamer chooses.
    """

    def __init__(
        self,
        world: Neighbours,
        copies: Sequence[tuple[int, int]],
        *,
        mode: str,
        programs: int,
        chunks: int | None = None,
    ) -> None:
        from transfer_chunked import ChunkedStreamer

        options: dict[str, Any] = {"relay": mode, "programs": programs, "chunks": chunks}
        self._world, self._copies, layout = world, copies, world.layout
        self._streamers = [
            ChunkedStreamer(board, world.topology, **options) for board in world.boards
        ]
        ranks, first = world.topology.ranks, self._streamers[0]
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
        us = clock.us(self.launch, self.prepare)
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


def direct(bench: TransferBench) -> None:
    """Every rank sends its expert to the next rank."""
    from ultraep.backends.triton.streamer import WARPS, WORDS

    scale, lines, tile = bench.scale, [], f"{WORDS} words, {WARPS} warps"
    world = Neighbours(scale.ranks, bench)
    ring = [(rank, (rank + 1) % scale.ranks) for rank in range(scale.ranks)]
    for programs in scale.programs:
        tell(f"direct: {programs} programs")
        us = Transfer(world, ring, mode="direct", programs=programs).time(bench.clock)
        rate = 2 * scale.ring_bytes / us
        case: Case = {"ranks": scale.ranks, "tile": tile, "programs": programs}
        values: Values = {TIME: us, RATE: rate / 1e6, SHARE: rate / bench.copy_rate}
        lines.append(Line(case, values))
    bench.table(
        f"direct: each rank sends an expert to the next, {scale.ring_bytes / 1e6:.1f} MB in all; "
        "programs of a rank",
        lines,
    )
    best = max(lines, key=_share)
    bench.report.note(
        f"Floor: a copy of as many bytes in {bench.copy_us(scale.ring_bytes):.1f} us, "
        f"{tera(bench.copy_rate)}. Best: {_share(best):.3f} of it with {best.case['programs']} "
        f"programs, {best.case['tile']}; goal {ENOUGH_OF_COPY}: "
        f"{verdict(_share(best) >= ENOUGH_OF_COPY)}.\n"
        "All programs share the device. If it cannot hold them all at once, some start late."
    )


def _share(line: Line) -> float:
    return line.values[SHARE] or 0.0


def relay(bench: TransferBench) -> None:
    """One expert to many ranks: by its home alone, handed on from rank to rank, and as chosen."""
    from ultraep.backends.triton.streamer import SIGNAL_COST

    scale = bench.scale
    world = Neighbours(scale.relay_ranks, bench)
    lines = [line for budget in scale.budgets for line in _fan_outs(bench, world, budget)]
    bench.table("relay: one expert to as many ranks as the fan-out says; programs of a rank", lines)
    far = {
        line.case["programs"]: ratio
        for line in lines
        if line.case["fan-out"] == SWEPT_FAN and (ratio := line.values[MODE_RATIO["chain"]])
    }
    bench.report.note(
        "x fan 1: time over that of one copy with as many programs; at best 1, whatever the "
        "fan-out.\nDirect sends the expert that often, one after the other, so x fan 1 is about "
        f"the fan-out. Goal for a chain of {SWEPT_FAN}: at most {SLOW_CHAIN}. "
        + "; ".join(f"{p} programs: {r:.2f}, {verdict(r <= SLOW_CHAIN)}" for p, r in far.items())
        + "."
    )
    alone = [line.values[MODE_TIME["chain"]] or 0.0 for line in lines if line.case["fan-out"] == 1]
    fits = [_chunk_sweep(bench, world, *one) for one in zip(scale.budgets, alone, strict=True)]
    swept, found, signals = zip(*fits, strict=True)
    bench.table(
        "relay: the chain, cut into more and more chunks",
        [line for table in swept for line in table],
    )
    bench.report.note(
        "fit us: (n + d - 1) * (S / (n * B) + a) with n chunks, d hops, S bytes of an expert; B "
        "and a, the rate of a hop and the cost of a signal, are fitted to the times of each budget."
    )
    bench.table("relay: the fit, and the chunks that the streamer chooses", list(found))
    bench.report.note(
        "signal KiB: what a program moves meanwhile, B * a / programs; the streamer takes "
        f"{SIGNAL_COST / 2**10:.3g} KiB for it (SIGNAL_COST)."
    )
    _links(bench, max(0.0, signals[-1]), scale.budgets[-1])


def _fan_outs(bench: TransferBench, world: Neighbours, programs: int) -> list[Line]:
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
    bench: TransferBench, world: Neighbours, programs: int, alone: float
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


def _links(bench: TransferBench, signal: float, programs: int) -> None:
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
    bench.table(
        f"relay: MODEL, not measured: the same over links, with a signal of {signal:.2f} us", lines
    )
    bench.report.note(
        "450 GB/s to one side: NVLink of H100 and H200; 900: of GB200. The cost of a signal is the "
        f"one fitted for {programs} programs within one device; a link adds its own latency."
    )
