"""Stage 6 by launches, with even and ragged rows: section `ragged` of bench_grouped.py.

Eight partitions of a card work at once, as the ranks of bench_layer_gpu.py do; `total` is that of
the slowest. Rows are divided as tile-perfect and random even routing divide them, and as ultraep
serves two skewed loads. All take turns: a card that slows down by power does so for all.

Shapes: R ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median

import torch
from bench_layer_gpu import LOADS, SIZES, plan_for
from ceilings import RANDOM_EVEN, TILE_PERFECT, told_under
from grouped_mlp import DEEPSEEK, QWEN3, Mlp, Model
from harness import Bench, Line, Metric
from layer_card import Size
from timing import Call, Gpu, free, tell
from world import StageClock, graph_on, split, together

from ultraep import Plan

MODELS = tuple(zip((QWEN3, DEEPSEEK), SIZES, strict=True))
LOADED = (LOADS[1], LOADS[3])  # one hot expert, and many
TOTAL = "total"
MS = Metric("launch_time_p50", "ms", "ms", ".3f")
OVER_TILES = Metric("time_over_tile_perfect", "ratio", "over tile-perfect", ".3f")
ROUNDS, WARMUP = 7, 3

Rows = list[list[int]]  # of every slot of every rank


def ragged(bench: Bench) -> None:
    """Milliseconds of every launch, the mean of the ranks, and of all launches of the slowest."""
    assert isinstance(bench.clock, Gpu)
    for model, size in MODELS:
        tell(f"{model.name}, ragged")
        found, clock, power = measured(model, size, divisions(size), bench.clock)
        tiles = found[TILE_PERFECT]
        lines = [
            Line(
                {"model": model.name, "rows": name, "launch": launch},
                {MS: ms, OVER_TILES: ms / tiles[launch]},
            )
            for name, launches in found.items()
            for launch, ms in launches.items()
        ]
        state = f"{clock:.0f} MHz, {power:.0f} W" if clock and power else "clock unknown"
        bench.table(f"{size.model}: {size.ranks} partitions of {size.sms} SMs; {state}", lines)
        free()


def divisions(size: Size) -> dict[str, Rows]:
    """Rows of every slot, spare ones last, by the name of the routing."""
    even = {
        kind: rows_of(plan_for(size, LOADS[0], kind)[1]) for kind in (TILE_PERFECT, RANDOM_EVEN)
    }
    return even | {load.name: rows_of(plan_for(size, load, "ultraep")[1]) for load in LOADED}


def rows_of(plan: Plan) -> Rows:
    """What every rank serves: of its homes, and of one copy."""
    at_home = plan.loads.sum(axis=0)
    copied = [0] * plan.topology.ranks
    for (expert, host, _), quota in zip(plan.replicas.tolist(), plan.quotas.tolist(), strict=True):
        at_home[expert] -= quota
        copied[host] += quota
    homes = [plan.topology.home_experts(rank) for rank in range(plan.topology.ranks)]
    return [[*at_home[own].tolist(), copy] for own, copy in zip(homes, copied, strict=True)]


def measured(
    model: Model, size: Size, divided: Mapping[str, Rows], clock: Gpu
) -> tuple[dict[str, dict[str, float]], float | None, float | None]:
    """Milliseconds by routing and launch; MHz and watts under load."""
    parts = split(size.ranks, size.sms)
    room = max(sum(rows) for of_ranks in divided.values() for rows in of_ranks)
    slots = size.experts // size.ranks + 1
    mlps = [
        Mlp(model, slots, room, clock, sms=part.sms, seed=rank) for rank, part in enumerate(parts)
    ]
    streams = [part.stream() for part in parts]
    divide(mlps, divided[TILE_PERFECT])
    mlps[0].forward()  # compiles
    mlps[0].backward()
    clocks = [StageClock.on_device() for _ in parts]
    graphs = [
        graph_on(stream, lambda mlp=mlp, stages=stages: step(mlp, stages))  # type: ignore[misc]
        for mlp, stages, stream in zip(mlps, clocks, streams, strict=True)
    ]

    def replay() -> None:
        together([graph.replay for graph in graphs], streams)

    found = in_turn(mlps, divided, clocks, replay)
    return found, *told_under(replay)


def step(mlp: Mlp, stages: StageClock) -> None:
    stages.mark("begin")
    mlp.forward(stages.mark)
    mlp.backward(stages.mark)


def divide(mlps: Sequence[Mlp], rows: Rows) -> None:
    for mlp, own in zip(mlps, rows, strict=True):
        mlp.divide(own)
    torch.cuda.synchronize()


def in_turn(
    mlps: Sequence[Mlp], divided: Mapping[str, Rows], clocks: Sequence[StageClock], replay: Call
) -> dict[str, dict[str, float]]:
    """Medians of rounds in which every routing has its turn; none is always the first."""
    seen: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in divided}
    for turn in range(WARMUP + ROUNDS):
        names = list(divided)
        for name in names if turn % 2 else reversed(names):
            divide(mlps, divided[name])
            replay()
            torch.cuda.synchronize()
            if turn < WARMUP:
                continue
            times = [stages.times() for stages in clocks]
            for launch in times[0]:
                seen[name][launch].append(fmean(own[launch] for own in times))
            seen[name][TOTAL].append(max(sum(own.values()) for own in times))
    return {name: {key: median(ms) for key, ms in own.items()} for name, own in seen.items()}
