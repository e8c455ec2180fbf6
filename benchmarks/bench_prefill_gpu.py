"""Prefill as eight ranks on one GPU: a whole MoE layer forward, by tokens per rank.

    python benchmarks/bench_prefill_gpu.py            # a GPU with green contexts, cuda-python
    python benchmarks/bench_prefill_gpu.py --toy      # tiny; without a GPU, only plans

Like `bench_layer_gpu.py` without backward, for whole layers and few to many tokens: how balancing
performs for small microbatches, and from how many tokens on it pays. Replicas are sent in every
step. ultraep alternates with the ceilings of `card.py`.

Shapes: T tokens of a rank, K experts per token, R ranks, E experts, D model width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from bench_layer_gpu import OPTIONS, plan_for, sizes_of
from card import DRAWN, OF_MATMUL, Ceilings, Measured, Size, World, even_plan
from harness import KERNELS, Bench, Case, Line, Metric, Values, main
from layers import GAIN, plan_values, step_values
from load_cases import HotRank

POLICIES = ("none", "ultraep")
BREAK_EVEN = Metric("break_even_tokens", "tokens of a rank", "break-even", ".0f")
TOKENS = (128, 512, 2048, 8192, 16384)
SIZES = (
    Size(model="Qwen3-235B", hidden=4096, ffn=1536, experts=128, tokens=16384, rounds=9),
    Size(model="DeepSeek-V3", hidden=7168, ffn=2048, experts=256, tokens=8192, rounds=9),
)  # tokens: the most for which two layers fit in memory
TOY = Size(model="toy", hidden=256, ffn=128, experts=16, tokens=128, top_k=2, ranks=2, rounds=2)
LOADS = (HotRank(1.5), HotRank(2.0), HotRank(2.0, inner=1.0))


def timed_steps(size: Size, hot: Sequence[HotRank]) -> dict[HotRank, tuple[float, Measured]]:
    """Time the layer without balancing, then ultraep in turn with the ceilings.

    Uneven loads need the most memory, so they come before the ceilings are allocated.
    """
    world, uneven = World(size, backward=False), {}
    for load in hot:
        world.prepare(*plan_for(size, load, "none"))
        uneven[load] = world.time()
        world.check()
    world.leave()
    ceilings, times = Ceilings(world.beside()), {}
    for load in hot:
        world.prepare(*plan_for(size, load, "ultraep"))
        times[load] = uneven[load], ceilings.in_turn_with(world.replay, size.rounds)
        world.check()
    world.leave()
    ceilings.world.leave()
    return times


def lines_of(size: Size, hot: Sequence[HotRank], *, timed: bool) -> list[Line]:
    """Lines of all loads and policies; even routing as timed with the last load."""
    times = timed_steps(size, hot) if timed else {}
    lines = []
    for load, policy in product(hot, POLICIES):
        _, plan = plan_for(size, load, policy)
        values = values_of(size, policy, *times[load]) if load in times else {}
        case: Case = {"tokens": size.tokens, "load": load.name, "policy": policy}
        lines.append(Line(case, {**values, **plan_values(plan)}))
    for kind in DRAWN:
        case = {"tokens": size.tokens, "load": kind, "policy": "none"}
        values = values_of(size, kind, *times[hot[-1]]) if times else {}
        lines.append(Line(case, {**values, **plan_values(even_plan(size, kind))}))
    return lines


def values_of(size: Size, variant: str, uneven_ms: float, measured: Measured) -> Values:
    """Values of a policy, or of a kind of even routing."""
    flops = 2 * 3 * size.hidden * size.ffn * size.ranks * size.rows
    times = {"none": uneven_ms, "ultraep": measured.ms} | measured.ceilings
    ms = times[variant]
    of_matmul = measured.values(flops)[OF_MATMUL] if variant == "ultraep" else None
    return {**step_values(size, ms, uneven_ms), **measured.shares(ms), OF_MATMUL: of_matmul}


def break_even(tokens: list[int], gains: list[float]) -> float | None:
    """Tokens at which the gain passes 1, interpolated; None: it never does.

    >>> break_even([512, 1024, 2048], [0.8, 0.9, 1.1])
    1448.0
    """
    for index, gain in enumerate(gains):
        if gain >= 1:
            if index == 0:
                return float(tokens[0])
            known = np.log2(tokens[index - 1 : index + 1])
            return float(round(2 ** np.interp(1.0, gains[index - 1 : index + 1], known)))
    return None


def break_even_lines(lines: list[Line]) -> list[Line]:
    """Break-even tokens of every load; the smallest size if balancing is always faster."""
    found_lines = []
    for name in dict.fromkeys(line.case["load"] for line in lines):
        case = {"load": name, "policy": "ultraep"}
        own = [line for line in lines if case.items() <= line.case.items()]
        gains = [line.values[GAIN] or 0.0 for line in own]
        if own:
            tokens = [int(line.case["tokens"]) for line in own]
            found_lines.append(Line(case, {BREAK_EVEN: break_even(tokens, gains)}))
    return found_lines


@dataclass(frozen=True)
class Scale:
    """What one run measures."""

    sizes: tuple[Size, ...] = SIZES
    tokens: tuple[int, ...] = TOKENS
    loads: tuple[HotRank, ...] = LOADS


def prefill(bench: Bench) -> None:
    """Print the tables of every model."""
    if not bench.on_gpu:
        bench.report.note("No GPU: plans only, nothing is timed.")
    for size in sizes_of(bench):
        lines: list[Line] = []
        for count in (number for number in bench.scale.tokens if number <= size.tokens):
            bench.report.note(f"... {size.model}, {count} tokens")
            lines += lines_of(replace(size, tokens=count), bench.scale.loads, timed=bench.on_gpu)
        about = f"forward, EP{size.ranks} on {size.sms} SMs each"
        bench.table(f"{size.model}: {size.about}, {about}", lines, section="prefill")
        if bench.on_gpu:
            title = f"{size.model}: tokens per rank from which balancing is faster"
            bench.table(title, break_even_lines(lines), section="break-even")


if __name__ == "__main__":
    toy = Scale((TOY,), (64, 128), (HotRank(1.2),))
    scales = {"toy": toy, "quick": Scale(tokens=(512, 8192)), "full": Scale()}
    main("prefill_gpu", __doc__, {"": prefill}, scales, needs=KERNELS, extra=OPTIONS)
