"""Transfers of weights and gradients between ranks, compared with a plain copy.

    python benchmarks/bench_transfer.py                       # needs a GPU; a minute
    python benchmarks/bench_transfer.py --only relay,reduce   # some sections
    python benchmarks/bench_transfer.py --only critical       # needs no GPU
    python benchmarks/bench_transfer.py --toy                 # tiny, for CI; also without a GPU

All ranks belong to one process on one device, and one launch streams for all of them. This measures
the kernels and the memory of one device, not a link. Every transfer is compared bit by bit with the
expected result: the target is overwritten before each timed launch and read after the last one.
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

BARRIERS = 50  # per graph
LINK_PROGRAMS = 16  # enough to saturate a link
INNER = 20  # schedules per graph
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
COPIES = Metric("copies_mean", "copies", "replicas", ".1f")
EGRESS = Metric("egress_max", "experts", "out", ".0f", max)
INGRESS = Metric("ingress_max", "copies", "in", ".0f", max)
LONGEST = Metric("longest_chain_max", "hops", "hops", ".0f", max)
PATH = {m: Metric(f"{m}_path_mean", "experts", m, ".2f") for m in MODES}
WORST_PATH = {m: Metric(f"{m}_path_worst", "experts", "worst", ".2f", max) for m in MODES}
NODE = Metric("launch_floor", "us", "floor us", ".2f")
SCHEDULE = {m: Metric(f"{m}_graph_time_p50", "us", f"{m} us", ".2f") for m in MODES}
BARRIER = Metric("meeting_time", "us", "us", ".2f")


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
    for experts, zero in product(copied_experts(scale), (False, True)):
        us, moved = pull.time(experts, zero), experts.moved(scale.numbers, zero)
        floor = moved / plain_rate
        case = {"copies": experts.name, "zeros": "yes" if zero else "no", "programs": programs}
        values = {TIME: us, RATE: moved / us / 1e6, FLOOR: floor, OF_FLOOR: floor / us}
        lines.append(Line(case, values))
    bench.table("reduce: fp32 gradients of replicas, pulled; zeros: slots are cleared", lines)
    bench.report.note(
        f"fan 4: 4 replicas of one expert of {scale.numbers / 1e6:.1f} M numbers. Floor: replica\n"
        "gradients read, home gradients read and written, zeros written, at the rate of a copy."
    )


def critical(bench: Bench) -> None:
    """Count what the busiest rank sends in real plans, in experts."""
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
        "out: different experts that the busiest home gives away; in: replicas per rank; hops: of\n"
        "the longest chain; maximum over seeds. direct: replicas that the busiest rank sends from\n"
        "their home. chain: hops that the busiest rank sends or forwards, plus (d - 1) / n for d\n"
        "hops in n chunks. auto: the shorter for each plan."
    )


def _paths(plan: Plan, nbytes: int) -> Values:
    from ultraep.backends.triton.streamer import chunks_for

    hops_of_mode = {mode: hops(plan, mode) for mode in ("direct", "chain")}
    longest = _longest(hops_of_mode["chain"])
    chunks = chunks_for(longest, nbytes, LINK_PROGRAMS)
    path = {mode: float(_busiest(sent)[1]) for mode, sent in hops_of_mode.items()}
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


def _busiest(sent: Sequence[Hop]) -> tuple[int, int]:
    """The rank that sends most, and its number of hops."""
    return (Counter(hop.sender for hop in sent).most_common(1) or [(0, 0)])[0]


def _longest(chain: Sequence[Hop]) -> int:
    return max((hop.depth + 1 for hop in chain), default=0)


def schedule(bench: Bench) -> None:
    """Time the kernel that turns a plan into the hops of one rank."""
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
    bench.report.note("Floor: an empty kernel in such a graph.")


def _schedule_us(bench: Bench, board: Signals, plan: Plan, mode: str) -> float:
    """Of one mode; tests compare the result with that of the host."""
    from ultraep.backends.triton.streamer import Streamer

    streamer = Streamer(board, plan.topology, relay=mode, programs=1)
    replicas_C3 = as_replicas(plan.replicas.tolist(), streamer.copies, bench.clock.device)
    made = torch.zeros(streamer.size, dtype=torch.int32, device=bench.clock.device)
    layout = bench.scale.layout
    return bench.clock.stopwatch(partial(streamer.schedule, replicas_C3, layout, made), INNER)()


def barrier(bench: Bench) -> None:
    """Time barriers of all ranks, each in its own graph and stream."""
    lines = []
    for ranks in bench.scale.meets:
        lines.append(Line({"ranks": ranks}, {BARRIER: barrier_us(ranks, bench)}))
    bench.table("barrier: one barrier of all ranks on one device", lines)


def barrier_us(ranks: int, bench: Bench) -> float:
    """Microseconds per barrier, from graphs of two lengths, which cancels other costs."""
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
    short, long = graphs(BARRIERS), graphs(3 * BARRIERS)
    us = [bench.clock.us(partial(together, calls, streams)) for calls in (short, long)]
    boards[0].check()
    return (us[1] - us[0]) / (2 * BARRIERS)


SECTIONS = {
    "direct": direct,
    "relay": relay,
    "critical": critical,
    "reduce": reduce,
    "schedule": schedule,
    "barrier": barrier,
}
# In CARD sections ranks must run concurrently, which the interpreter cannot do.
NEEDS = {"critical": ANY, "reduce": KERNELS, "schedule": KERNELS}
NEEDS |= dict.fromkeys(("direct", "relay", "barrier"), CARD)


if __name__ == "__main__":
    torch.manual_seed(0)
    scales = {"toy": TOY, "quick": FULL, "full": FULL}
    main("transfer", __doc__, SECTIONS, scales, needs=NEEDS)
