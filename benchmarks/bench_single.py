"""One rank: a whole MoE layer compared with a plain torch layer, forward and backward.

    python benchmarks/bench_single.py                        # needs a GPU; a minute
    python benchmarks/bench_single.py --only extension_api   # one of the sections
    python benchmarks/bench_single.py --toy                  # tiny, for CI; also without a GPU

Ids and gates are fixed, so no router is timed. In one run, with the same weights:

    torch, index_add   rows sorted by expert, `torch._grouped_mm`, sums by index_add
    torch, gathers     the same, but every sum over choices gathers its rows
    messages           our layer on the messages plane
    mapped             our layer on the mapped plane

Outputs and all gradients are compared before the timing. The layers alternate; a round is several
steps between two events, and the median round counts. The baseline is the faster of the two torch
layers. `extension_api` compares stage 6 in the same way: the torch experts on arrived rows, alone
and with the weights that a balancer provides (`serve`). `transformers` times a MoE block of
transformers, router included: unmodified, and with our stages and policy "none".

Shapes: T tokens, K experts per token, E experts, A = T * K rows, D model width, F hidden width.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import KERNELS, Bench, Line, Metric, installed, main
from layers import PLAIN as UNMODIFIED
from layers import check_close, qwen3_config
from load_cases import Shape
from single_contenders import (
    EXTENSION_API,
    OURS,
    PLAIN,
    Contender,
    Inputs,
    Make,
    compare,
    experts_alone,
    name_of,
)
from timing import Clock, alternating_ms, free

STEP = Metric("step_time_p50", "ms", "ms", ".3f")
SPEED = Metric("speed_over_torch_grouped", "ratio", "speed", ".3f")
EXTENSION_SPEED = Metric("speed_over_own_experts", "ratio", "speed", ".3f")
OVERHEAD = Metric("overhead_over_unmodified", "ratio", "overhead", "+.4f")
ALONE = "experts alone"


@dataclass(frozen=True)
class Scale:
    """What one run measures."""

    shapes: tuple[Shape, ...]
    rounds: int
    steps: int  # steps per round


SHAPES = (
    Shape(hidden=2048, ffn=768, experts=128, top_k=8, tokens=8192),
    Shape(hidden=4096, ffn=1536, experts=16, top_k=8, tokens=8192),
    Shape(hidden=2880, ffn=2880, experts=32, top_k=4, tokens=8192),
)
FULL, QUICK = Scale(SHAPES, rounds=15, steps=5), Scale(SHAPES, rounds=5, steps=5)
TOY = Scale((Shape(hidden=16, ffn=16, experts=4, top_k=2, tokens=8),), rounds=1, steps=1)


def layer(bench: Bench) -> None:
    """Measure milliseconds per step, and the speed relative to the faster torch layer."""
    lines = []
    for shape in bench.scale.shapes:
        times = measured(bench, Inputs.of_tokens(shape, bench.clock), PLAIN | OURS)
        lines += lines_of(shape, times, SPEED, min(times[name] for name in PLAIN))
    about = f"EP1, {bench.scale.shapes[0].tokens} tokens, forward and backward, {bench.clock.dtype}"
    bench.table(f"{about}; shape D/F/experts/top-k", lines)


def extension_api(bench: Bench) -> None:
    """Measure stage 6 with torch experts, alone and through the extension API."""
    lines = []
    for shape in bench.scale.shapes:
        inputs = Inputs.of_tokens(shape, bench.clock).arrived()
        times = measured(bench, inputs, {ALONE: experts_alone} | EXTENSION_API)
        lines += lines_of(shape, times, EXTENSION_SPEED, times[ALONE])
    about = "EP1, stage 6 with torch's grouped products, forward and backward"
    bench.table(f"{about}; shape D/F/experts/top-k", lines)


def lines_of(shape: Shape, times: dict[str, float], speed: Metric, baseline: float) -> list[Line]:
    return [
        Line({"shape": name_of(shape), "path": name}, {STEP: ms, speed: baseline / ms})
        for name, ms in times.items()
    ]


def transformers(bench: Bench) -> None:
    """Measure a MoE block of transformers, and the overhead of our stages."""
    from ultraep.integrations.transformers import balance

    shape, clock = bench.scale.shapes[0], bench.clock
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randn(1, shape.tokens, shape.hidden, generator=draw)
    tokens = tokens.to(clock.device, clock.dtype).requires_grad_()
    blocks = {UNMODIFIED: transformers_block(shape, clock)}
    for plane in ("messages", "auto") if bench.on_gpu else ("messages",):
        blocks[f"balanced, {plane}"] = balanced = copy.deepcopy(blocks[UNMODIFIED])
        balance(balanced, policy="none", data_plane=plane)

    def step(block: Any) -> torch.Tensor:
        block.zero_grad(set_to_none=True)
        tokens.grad = None
        y: torch.Tensor = block(tokens)
        y.sum().backward()
        return y

    wanted, gradient = step(blocks[UNMODIFIED]), tokens.grad
    for name, block in blocks.items():
        check_close(f"outputs of {name}", step(block), wanted)
        check_close(f"gradients of {name}", tokens.grad, gradient)
    steps = {name: partial(step, block) for name, block in blocks.items()}
    times = alternating_ms(clock, steps, bench.scale.rounds, bench.scale.steps, warmup=2)
    lines = []
    for name, ms in times.items():
        case = {"shape": name_of(shape), "tokens": shape.tokens, "block": name}
        lines.append(Line(case, {STEP: ms, OVERHEAD: ms / times[UNMODIFIED] - 1}))
    bench.table(f"EP1, policy none, forward and backward, {clock.dtype}", lines)


def transformers_block(shape: Shape, clock: Clock) -> Any:
    """Experts and router of a layer of Qwen3-MoE, with grouped products."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    with torch.device("meta"):
        block = (
            Qwen3MoeSparseMoeBlock(qwen3_config(shape))
            .to(clock.dtype)
            .to_empty(device=clock.device)
        )
    draw = torch.Generator(device=clock.device).manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=draw)
    return block


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
    sections = {"layer": layer, "extension_api": extension_api}
    if installed("transformers"):
        sections["transformers"] = transformers
    main("single", __doc__, sections, scales, needs=KERNELS)
