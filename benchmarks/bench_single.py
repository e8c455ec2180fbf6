"""One rank: a whole MoE layer compared with a plain torch layer, forward and backward.

    python benchmarks/bench_single.py                  # needs a GPU; a minute
    python benchmarks/bench_single.py --only seam      # one of the two sections
    python benchmarks/bench_single.py --toy            # tiny, for CI; also without a GPU

Ids and gates are fixed, so no router is timed. In one run, with the same weights:

    torch, index_add   rows sorted by expert, `torch._grouped_mm`, sums by index_add
    torch, gathers     the same, but every sum over choices gathers its rows
    messages           our layer on the messages plane
    mapped             our layer on the mapped plane

Outputs and all gradients are compared before the timing. The layers alternate; a round is several
steps between two events, and the median round counts. The baseline is the faster of the two torch
layers. `seam` compares stage 6 in the same way: the torch experts on arrived rows, alone and with
the weights that a balancer provides (`serve`).

Shapes: T tokens, K experts per token, E experts, A = T * K rows, D model width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness import KERNELS, Bench, Line, Metric, main
from load_cases import Shape
from single_contenders import (
    OURS,
    PLAIN,
    SEAM,
    Contender,
    Inputs,
    Make,
    compare,
    experts_alone,
    name_of,
)
from timing import alternating_ms, free

STEP = Metric("step_time_p50", "ms", "ms", ".3f")
SPEED = Metric("speed_over_torch_grouped", "ratio", "speed", ".3f")
SEAM_SPEED = Metric("speed_over_own_experts", "ratio", "speed", ".3f")
ALONE = "experts alone"


@dataclass(frozen=True)
class Scale:
    """What one run measures."""

    shapes: tuple[Shape, ...]
    rounds: int
    steps: int  # steps per round


def shapes(*sizes: tuple[int, int, int, int], tokens: int) -> tuple[Shape, ...]:
    names = ("hidden", "ffn", "experts", "top_k")
    return tuple(Shape(tokens=tokens, **dict(zip(names, size, strict=True))) for size in sizes)


SHAPES = shapes((2048, 768, 128, 8), (4096, 1536, 16, 8), (2880, 2880, 32, 4), tokens=8192)
FULL, QUICK = Scale(SHAPES, rounds=15, steps=5), Scale(SHAPES, rounds=5, steps=5)
TOY = Scale(shapes((16, 16, 4, 2), tokens=8), rounds=1, steps=1)


def layer(bench: Bench) -> None:
    """Measure milliseconds per step, and the speed relative to the faster torch layer."""
    lines = []
    for shape in bench.scale.shapes:
        times = measured(bench, Inputs.of_tokens(shape, bench.clock), PLAIN | OURS)
        plain = min(times[name] for name in PLAIN)
        for name, ms in times.items():
            lines.append(
                Line({"shape": name_of(shape), "path": name}, {STEP: ms, SPEED: plain / ms})
            )
    about = f"EP1, {bench.scale.shapes[0].tokens} tokens, forward and backward, {bench.clock.dtype}"
    bench.table(f"{about}; shape D/F/experts/top-k", lines)


def seam(bench: Bench) -> None:
    """Measure stage 6 with torch experts, alone and through the seam."""
    lines = []
    for shape in bench.scale.shapes:
        inputs = Inputs.of_tokens(shape, bench.clock).arrived()
        times = measured(bench, inputs, {ALONE: experts_alone} | SEAM)
        for name, ms in times.items():
            lines.append(
                Line(
                    {"shape": name_of(shape), "path": name},
                    {STEP: ms, SEAM_SPEED: times[ALONE] / ms},
                )
            )
    about = "EP1, stage 6 with torch's grouped products, forward and backward"
    bench.table(f"{about}; shape D/F/experts/top-k", lines)


def measured(bench: Bench, inputs: Inputs, makes: Mapping[str, Make]) -> dict[str, float]:
    """Median milliseconds per step of each contender; they alternate."""
    contenders = {name: Contender(inputs, make) for name, make in makes.items()}
    compare(contenders)
    steps = {name: contender.step for name, contender in contenders.items()}
    times = alternating_ms(bench.clock, steps, bench.scale.rounds, bench.scale.steps)
    del steps
    contenders.clear()
    free()
    return times


if __name__ == "__main__":
    scales = {"toy": TOY, "quick": QUICK, "full": FULL}
    main("single", __doc__, {"layer": layer, "seam": seam}, scales, needs=KERNELS)
