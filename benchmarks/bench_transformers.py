"""What our stages cost a MoE block of transformers: balanced and unmodified, on one rank.

    python benchmarks/bench_transformers.py          # needs a GPU; a minute
    python benchmarks/bench_transformers.py --toy    # tiny, for CI; also without a GPU

Forward and backward of a block with grouped experts, router included, with policy "none". Outputs
are compared before the timing. `bench_frameworks.py` measures what balancing gains.

Shapes: T tokens of a rank, K experts per token, E experts, D model width.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from harness import KERNELS, Bench, Line, Metric, Values, main
from layers import PLAIN, Step
from load_cases import Shape
from timing import alternating_ms
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from ultraep.integrations.transformers import balance

STEP = Metric("step_time_p50", "ms", "ms", ".3f")
OVERHEAD = Metric("overhead_over_unmodified", "ratio", "overhead", "+.4f")


@dataclass(frozen=True)
class Scale:
    """What one run measures."""

    shape: Shape
    rounds: int
    steps: int  # steps per round, on a GPU


QWEN = Shape(hidden=2048, ffn=768, experts=128, top_k=8, tokens=8192)  # of Qwen3-30B-A3B
FULL = Scale(QWEN, 21, 5)
QUICK = Scale(QWEN, 9, 5)
TOY = Scale(Shape(hidden=16, ffn=16, experts=4, top_k=2, tokens=8), 2, 1)


def block(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """Experts and router of a layer, with grouped products."""
    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.ffn,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        experts_implementation="grouped_mm",
    )
    with torch.device("meta"):
        made = Qwen3MoeSparseMoeBlock(config).to(dtype).to_empty(device=device)
    draw = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=draw)
    return made


def overhead(bench: Bench) -> None:
    """Measure milliseconds per step of one rank, and the overhead over unmodified."""
    shape, clock = bench.scale.shape, bench.clock
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randn(shape.tokens, shape.hidden, generator=draw).to(clock.device, clock.dtype)
    plain = block(shape, clock.device, clock.dtype)
    steps = {PLAIN: Step(plain, tokens[None])}
    for plane in ("messages", "auto") if bench.on_gpu else ("messages",):
        balanced = copy.deepcopy(plain)
        balance(balanced, policy="none", data_plane=plane)
        steps[f"balanced, {plane}"] = Step(balanced, tokens[None])
    for name, step in steps.items():
        step()
        step.compare(name, steps[PLAIN])
    times = alternating_ms(clock, steps, bench.scale.rounds, bench.scale.steps, warmup=2)
    about = "/".join(str(n) for n in (shape.hidden, shape.ffn, shape.experts, shape.top_k))
    lines = []
    for name, ms in times.items():
        values: Values = {STEP: ms, OVERHEAD: ms / times[PLAIN] - 1}
        lines.append(Line({"shape": about, "tokens": shape.tokens, "block": name}, values))
    bench.table(f"EP1, policy none, forward and backward, {clock.dtype}", lines)


SECTIONS = {"overhead": overhead}
NEEDS = {"overhead": KERNELS}


if __name__ == "__main__":
    scales = {"toy": TOY, "quick": QUICK, "full": FULL}
    main("transformers", __doc__, SECTIONS, scales, needs=NEEDS)
