"""Weights and gradients between ranks: how fast, beside a plain copy of as many bytes.

    python benchmarks/bench_transfer.py                       # needs a GPU; a minute
    python benchmarks/bench_transfer.py --only relay,reduce   # some sections
    python benchmarks/bench_transfer.py --only critical       # needs no GPU
    python benchmarks/bench_transfer.py --toy                 # tiny, for CI; also without a GPU

All ranks are ranks of one process on one device, and one launch streams for all of them: the
kernels and the memory of one device are measured, not a link between two. Every transfer is
compared, bit by bit, with what it should bring: before each timed launch its target is overwritten,
after the last one it is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch
from card import graph_on, together
from harness import ANY, CARD, KERNELS, Bench, Case, Line, Metric, Samples, Values, main
from load_cases import ORDERED, SHUFFLED, Kind
from timing import Call, Gpu
from transfer_parts import (
    FULL,
    TOY,
    Neighbours,
    Pull,
    Transfer,
    as_replicas,
    board_of,
    copied_experts,
    copy_rate,
)

import ultraep
from ultraep import Plan, Topology
from ultraep.hops import MODES, Hop, choose, hops
from ultraep.runtime.mapped.peers import LocalPeers

if TYPE_CHECKING:  # kernels are imported late: Triton reads its settings when they are
    from ultraep.backends.triton.signals import Signals

MEETS = 50  # meetings of a graph
LINK_PROGRAMS = 16  # that fill a link
INNER = 20  # schedules in one graph
TIME = Metric("time_p50", "us", "us", ".1f")
RATE = Metric("rate", "TB/s", "TB/s", ".3f")
SHARE = Metric("share_of_copy", "share", "of copy", ".3f")
MODE_TIME = {m: Metric(f"{m}_time_p50", "us", f"{m} us", ".1f") for m in MODES}
MODE_RATIO = {m: Metric(f"{m}_over_fan_out_1", "ratio", "x fan 1", ".2f") for m in MODES}
CHUNKS = Metric("chain_chunks", "chunks", "chunks", ".0f")
SIGNAL = Metric("fitted_cost_of_a_signal", "us", "signal us", ".2f")
FLOOR = Metric("floor", "us", "floor us", ".1f")
OF_FLOOR = Metric("share_of_floor", "share", "of floor", ".3f")
BEFORE = Metric("imbalance_before_mean", "max/mean", "before", ".2f")
COPIES = Metric("copies_mean", "copies", "copies", ".1f")
EGRESS = Metric("egress_max", "experts", "out", ".0f", max)
INGRESS = Metric("ingress_max", "copies", "in", ".0f", max)
LONGEST = Metric("longest_chain_max", "hops", "hops", ".0f", max)
PATH = {m: Metric(f"{m}_path_mean", "experts", m, ".2f") for m in MODES}
WORST_PATH = {m: Metric(f"{m}_path_worst", "experts", "worst", ".2f", max) for m in MODES}
NODE = Metric("launch_floor", "us", "floor us", ".2f")
SCHEDULE = {m: Metric(f"{m}_graph_time_p50", "us", f"{m} us", ".2f") for m in MODES}
MEETING = Metric("meeting_time", "us", "us", ".2f")


def direct(bench: Bench) -> None:
    """Every rank sends its expert to the next rank."""
    scale, lines, copied = bench.scale, [], copy_rate(bench)
    world = Neighbours(scale.ranks, bench)
    ring = [(rank, (rank + 1) % scale.ranks) for rank in range(scale.ranks)]
    for programs in scale.programs:
        us = Transfer(world, ring, mode="direct", programs=programs).time(bench.clock)
        rate = 2 * scale.ring_bytes / us
        case: Case = {"ranks": scale.ranks, "programs": programs}
        lines.append(Line(case, {TIME: us, RATE: rate / 1e6, SHARE: rate / copied}))
    about = f"{scale.ring_bytes / 1e6:.1f} MB in all; programs of a rank"
    bench.table(f"direct: each rank sends an expert to the next, {about}", lines)


def relay(bench: Bench) -> None:
    """One expert to many ranks: by its home alone, handed on from rank to rank, and as chosen."""
    world = Neighbours(bench.scale.relay_ranks, bench)
    lines = []
    for programs in bench.scale.budgets:
        single: dict[str, float] = {}
        for fan in bench.scale.fans:
            values: dict[Metric, float | None] = {SIGNAL: None}
            for mode in MODES:
                copies = [(0, host) for host in range(1, fan + 1)]
                transfer = Transfer(world, copies, mode=mode, programs=programs)
                us = transfer.time(bench.clock)
                single.setdefault(mode, us)
                values |= {MODE_TIME[mode]: us, MODE_RATIO[mode]: us / single[mode]}
                if mode == "chain":
                    values |= {CHUNKS: transfer.chunks}
                    if transfer.chunks > 1 and fan > 1:
                        values[SIGNAL] = signal_us(us, single[mode], transfer.chunks, fan)
            case = {"ranks": world.topology.ranks, "programs": programs, "fan-out": fan}
            lines.append(Line(case, values))
    bench.table("relay: one expert to as many ranks as the fan-out says; programs of a rank", lines)
    bench.report.note(
        "x fan 1: time over that of one copy with as many programs. signal: cost a of a hop\n"
        "beside its bytes, from (n + d - 1) * (u / n + a) for n chunks and d hops."
    )


def signal_us(chain: float, single: float, chunks: int, hop_count: int) -> float:
    """Solve for the cost of a signal, given the times of a chain and of one copy.

    >>> signal_us(chain=(4 + 8 - 1) * (100 / 4 + 2), single=100 + 2, chunks=4, hop_count=8)
    2.0
    """
    return (chain / (chunks + hop_count - 1) - single / chunks) / (1 - 1 / chunks)


def reduce(bench: Bench) -> None:
    """Gradients of copies, pulled by the home and added in fixed order."""
    clock, scale, lines, copied = bench.clock, bench.scale, [], copy_rate(bench)
    programs = 4 * clock.multiprocessors if isinstance(clock, Gpu) else 2  # of the data plane
    pull = Pull(bench, programs)
    for experts, zero in product(copied_experts(scale), (False, True)):
        us, moved = pull.time(experts, zero), experts.moved(scale.numbers, zero)
        floor = moved / copied
        case = {"copies": experts.name, "zeros": "yes" if zero else "no", "programs": programs}
        values = {TIME: us, RATE: moved / us / 1e6, FLOOR: floor, OF_FLOOR: floor / us}
        lines.append(Line(case, values))
    bench.table("reduce: gradients of copies in fp32, pulled; zeros left behind or not", lines)
    bench.report.note(
        f"fan 4: 4 copies of one expert of {scale.numbers / 1e6:.1f} M numbers. Floor: gradients\n"
        "of copies read, those of homes read and written, zeros written, at the rate of the copy."
    )


def critical(bench: Bench) -> None:
    """Real plans: what the busiest rank has to send, in experts."""
    scale, nbytes = bench.scale, FULL.layout.nbytes
    for family in (ORDERED, SHUFFLED):
        samples = Samples()
        for (ranks, experts), ratio in product(scale.plan_sizes, scale.ratios):
            topology = Topology(ranks=ranks, experts=experts, slots=1)
            case: Case = {"load": family, "slots": 1, "ranks": ranks, "experts": experts}
            for seed in range(scale.seeds):
                loads = Kind(family, ratio).draw(ranks, experts, tokens=scale.tokens, seed=seed)
                plan = ultraep.plan(loads, topology, backend="cpu")
                samples.add({**case, "ratio": ratio}, _paths(plan, nbytes))
        title = f"critical path, in experts of {nbytes / 1e6:.1f} MB; {scale.seeds} seeds"
        bench.table(title, samples.lines())
    bench.report.note(
        "out: different experts that the busiest home gives away; in: copies that a rank gets;\n"
        "hops: the longest chain; the most of all seeds. direct: copies that the busiest rank\n"
        "sends, all from their home. chain: hops that the busiest rank sends, its own and those\n"
        "it hands on, and (d - 1) / n for d hops in n chunks. auto: the shorter, plan by plan."
    )


def _paths(plan: Plan, nbytes: int) -> Values:
    from ultraep.backends.triton.streamer import chunks_for

    ways = {mode: hops(plan, mode) for mode in ("direct", "chain")}
    longest = _longest(ways["chain"])
    chunks = chunks_for(longest, nbytes, LINK_PROGRAMS)
    path = {mode: float(_busiest(way)[1]) for mode, way in ways.items()}
    path["chain"] += max(0, longest - 1) / chunks
    path["auto"] = path[choose(plan, chunks)]
    values: dict[Metric, float | None] = {
        BEFORE: plan.initial_imbalance,
        COPIES: plan.num_replicas,
        EGRESS: plan.max_egress,
        INGRESS: plan.max_ingress,
        LONGEST: longest,
    }
    for mode in MODES:
        values |= {PATH[mode]: path[mode], WORST_PATH[mode]: path[mode]}
    return values


def _busiest(way: Sequence[Hop]) -> tuple[int, int]:
    """The rank that sends most, and how many hops it sends."""
    return (Counter(hop.sender for hop in way).most_common(1) or [(0, 0)])[0]


def _longest(chain: Sequence[Hop]) -> int:
    return max((hop.depth + 1 for hop in chain), default=0)


def schedule(bench: Bench) -> None:
    """The kernel that turns a plan into the hops of one rank."""
    floor = bench.clock.floor_us(1, INNER) if isinstance(bench.clock, Gpu) else None
    lines = []
    for ranks, experts in bench.scale.schedule_sizes:
        topology = Topology(ranks=ranks, experts=experts, slots=1)
        ratio = min(3.0, max(bench.scale.ratios))
        loads = Kind(SHUFFLED, ratio).draw(ranks, experts, tokens=bench.scale.tokens, seed=0)
        plan = ultraep.plan(loads, topology, backend="cpu")
        chain = hops(plan, "chain")
        busiest, _ = _busiest(chain)
        board = board_of(LocalPeers(ranks, bench.clock.device), busiest)
        values: dict[Metric, float | None] = {COPIES: plan.num_replicas}
        values[LONGEST] = _longest(chain)
        for mode in MODES:
            values[SCHEDULE[mode]] = _schedule_us(bench, board, plan, mode)
        case: Case = {"ranks": ranks, "experts": experts, "load": f"{SHUFFLED} {ratio:g}"}
        lines.append(Line(case, values | {NODE: floor}))
    bench.table("schedule: from a plan to the hops of its busiest rank, in a graph", lines)
    bench.report.note("Floor: a kernel that does nothing, in a graph like theirs.")


def _schedule_us(bench: Bench, board: Signals, plan: Plan, mode: str) -> float:
    """Of one mode; tests compare the result with that of the host."""
    from ultraep.backends.triton.streamer import Streamer

    streamer = Streamer(board, plan.topology, relay=mode, programs=1)
    replicas_C3 = as_replicas(plan.replicas.tolist(), streamer.copies, bench.clock.device)
    made = torch.zeros(streamer.size, dtype=torch.int32, device=bench.clock.device)
    layout = bench.scale.layout
    return bench.clock.stopwatch(partial(streamer.schedule, replicas_C3, layout, made), INNER)()


def meet(bench: Bench) -> None:
    """All ranks wait for each other, again and again, each in a graph on a stream of its own."""
    lines = []
    for ranks in bench.scale.meets:
        lines.append(Line({"ranks": ranks}, {MEETING: meeting_us(ranks, bench)}))
    bench.table("meet: one meeting of all ranks, within one device", lines)


def meeting_us(ranks: int, bench: Bench) -> float:
    """From graphs of two lengths: what else a replay costs is in both."""
    group = LocalPeers(ranks, bench.clock.device)
    boards = [board_of(group, rank) for rank in range(ranks)]
    streams = [torch.cuda.Stream() for _ in boards]

    def meet_often(board: Signals, meetings: int) -> None:
        for _ in range(meetings):
            board.barrier("rows")

    def graphs(meetings: int) -> list[Call]:
        return [
            graph_on(stream, partial(meet_often, board, meetings)).replay
            for stream, board in zip(streams, boards, strict=True)
        ]

    together([partial(board.barrier, "rows") for board in boards], streams)
    torch.cuda.synchronize()
    boards[0].check()
    short, long = graphs(MEETS), graphs(3 * MEETS)
    us = [bench.clock.us(partial(together, calls, streams)) for calls in (short, long)]
    boards[0].check()
    return (us[1] - us[0]) / (2 * MEETS)


SECTIONS = {
    "direct": direct,
    "relay": relay,
    "critical": critical,
    "reduce": reduce,
    "schedule": schedule,
    "meet": meet,
}
# The ranks of CARD sections must run at once, which the interpreter does not do.
NEEDS = {"critical": ANY, "reduce": KERNELS, "schedule": KERNELS}
NEEDS |= dict.fromkeys(("direct", "relay", "meet"), CARD)


if __name__ == "__main__":
    torch.manual_seed(0)
    scales = {"toy": TOY, "quick": FULL, "full": FULL}
    main("transfer", __doc__, SECTIONS, scales, needs=NEEDS)
