"""What plans ask of stage 3, in bench_transfer.py: critical paths, schedules, meetings."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from harness import Case, Line, Metric, Mismatch, Parts, Samples, Values
from load_cases import ORDERED, SHUFFLED, Kind
from timing import Call, Gpu, tell
from transfer_scale import FULL, TransferBench, as_replicas, board_of
from world import graph_on, together

import ultraep
from ultraep import Plan, Topology
from ultraep.hops import HOME, MODES, Hop, choose, hops
from ultraep.runtime.mapped.peers import LocalPeers

if TYPE_CHECKING:  # kernels are imported late: Triton reads its settings when they are
    from ultraep.backends.triton.board import Board

MEETS = 50  # meetings of a graph
LINK_PROGRAMS = 16  # that fill such a link
INNER = 20  # schedules in one graph
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


def critical(bench: TransferBench) -> None:
    """Real plans: what the busiest rank has to send, in experts."""
    scale, nbytes = bench.scale, FULL.layout.nbytes
    for family in (ORDERED, SHUFFLED):
        samples = Samples()
        tell(f"critical: {family}")
        for (ranks, experts), ratio in product(scale.plan_sizes, scale.ratios):
            topology = Topology(ranks=ranks, experts=experts, slots=1)
            case: Parts = {"load": family, "slots": 1, "ranks": ranks, "experts": experts}
            for seed in range(scale.seeds):
                loads = Kind(family, ratio).draw(ranks, experts, tokens=scale.tokens, seed=seed)
                plan = ultraep.plan(loads, topology, backend="cpu")
                samples.add(case | {"ratio": ratio}, _paths(plan, nbytes))
        title = f"critical path, in experts of {nbytes / 1e6:.1f} MB; {scale.seeds} seeds"
        bench.table(title, samples.lines())
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


def schedule(bench: TransferBench) -> None:
    """The kernel that makes of a plan what one rank has to do."""
    metrics = SCHEDULE if isinstance(bench.clock, Gpu) else INTERPRETED
    floor = bench.clock.floor_us(1, INNER) if isinstance(bench.clock, Gpu) else None
    lines = []
    for ranks, experts in bench.scale.schedule_sizes:
        tell(f"schedule: {ranks} ranks, {experts} experts")
        topology = Topology(ranks=ranks, experts=experts, slots=1)
        ratio = min(3.0, max(bench.scale.ratios))
        loads = Kind(SHUFFLED, ratio).draw(ranks, experts, tokens=bench.scale.tokens, seed=0)
        plan = ultraep.plan(loads, topology, backend="cpu")
        chain = hops(plan, "chain")
        busiest, sent = Counter(hop.sender for hop in chain).most_common(1)[0]
        board = board_of(LocalPeers(ranks, bench.clock.device), busiest)
        values: dict[Metric, float | None] = {
            COPIES: plan.num_replicas,
            HOPS: max((hop.depth + 1 for hop in chain), default=0),
            SENT: sent,
        }
        for mode in MODES:
            values[metrics[mode]] = _schedule_us(bench, board, plan, mode)
        case: Case = {"ranks": ranks, "experts": experts, "load": f"{SHUFFLED} {ratio:g}"}
        lines.append(Line(case, values | {NODE: floor}))
    bench.table("schedule: from a plan to the hops of its busiest rank, in a graph", lines)
    bench.report.note(
        "hops: of the longest chain; sent: hops of that rank, in chains.\n"
        "Floor: a kernel that does nothing, in a graph like theirs."
    )


def _schedule_us(bench: TransferBench, board: Board, plan: Plan, mode: str) -> float:
    """Of one mode; the result is compared with the twin's."""
    from ultraep.backends.triton.streamer import Streamer, chunks_for

    streamer = Streamer(board, plan.topology, relay=mode, programs=1)
    replicas_C3 = as_replicas(plan.replicas.tolist(), streamer.copies, bench.clock.device)
    made = torch.zeros(streamer.size, dtype=torch.int32, device=bench.clock.device)
    layout = bench.scale.layout
    call = partial(streamer.schedule, replicas_C3, layout, made)
    us = bench.clock.short_us(call, INNER)
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


def meet(bench: TransferBench) -> None:
    """All ranks wait for each other, again and again, each in a graph on a stream of its own."""
    lines, most = [], int(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])
    at_once = [ranks for ranks in bench.scale.meets if ranks < min(most, 16)]
    for ranks in at_once:
        tell(f"meet: {ranks} ranks")
        lines.append(Line({"ranks": ranks}, {MEETING: meeting_us(ranks, bench)}))
    bench.table("meet: one meeting of all ranks, within one device", lines)
    skipped = [ranks for ranks in bench.scale.meets if ranks not in at_once]
    if skipped:
        bench.report.note(
            f"Not measured: {', '.join(map(str, skipped))} ranks. All must run at once, each on a "
            "stream of its own, and one device does not promise that for so many."
        )


def meeting_us(ranks: int, bench: TransferBench) -> float:
    """From graphs of two lengths: what else a replay costs is in both."""
    group = LocalPeers(ranks, bench.clock.device)
    boards = [board_of(group, rank) for rank in range(ranks)]
    streams = [torch.cuda.Stream() for _ in boards]

    def meet_often(board: Board, meetings: int) -> None:
        for _ in range(meetings):
            board.meet("rows")

    def graphs(meetings: int) -> list[Call]:
        return [
            graph_on(stream, partial(meet_often, board, meetings)).replay
            for stream, board in zip(streams, boards, strict=True)
        ]

    together([partial(board.meet, "rows") for board in boards], streams)
    torch.cuda.synchronize()
    boards[0].check()
    short, long = graphs(MEETS), graphs(3 * MEETS)
    us = [bench.clock.us(partial(together, calls, streams)) for calls in (short, long)]
    boards[0].check()
    return (us[1] - us[0]) / (2 * MEETS)
