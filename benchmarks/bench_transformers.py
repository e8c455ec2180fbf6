"""A MoE block of transformers, balanced and unmodified, forward and backward.

    python benchmarks/bench_transformers.py                    # all but `gain` need a GPU; minutes
    python benchmarks/bench_transformers.py --only gain        # EP2 on two cores
    python benchmarks/bench_transformers.py --toy              # tiny, for CI; also without a GPU

`overhead`: the cost of our stages for a block with grouped experts, on one rank with policy "none".
The router is included; outputs are compared before the timing.
`card`: eight ranks on partitions of one GPU, in graphs, with the library's own experts through the
seam.
`gain`: two processes, one pinned core and one thread each, with fixed skewed routing, with and
without balancing; even routing is the ceiling. `cpu ms` is the CPU time of the busiest rank; on a
busy machine it is more reliable than the time of a step.

Shapes: T tokens of a rank, K experts per token, E experts, D model width.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import CPU, KERNELS, Bench, Line, Metric, Values, main
from layers import (
    FORCED,
    PLAIN,
    RATIO,
    SHARE,
    Facts,
    Step,
    check_close,
    gain_lines,
    on_ranks,
    plan_values,
    step_values,
    timed_steps,
)
from load_cases import HotRank, Shape, even_ids, skewed_ids
from timing import alternating_ms
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers_card import Blocks, FixedChoices

from ultraep.integrations.transformers import balance

STEP = Metric("step_time_p50", "ms", "ms", ".3f")
OVERHEAD = Metric("overhead_over_unmodified", "ratio", "overhead", "+.4f")


@dataclass(frozen=True)
class Scale:
    """What one run measures."""

    alone: Shape  # of one rank
    spread: Shape  # of the ranks that gain
    card: Shape  # of the ranks on one GPU
    hot: tuple[float, ...]  # imbalances of its loads
    rounds: int
    steps: int  # steps per round, on a GPU


ALONE = Shape(hidden=2048, ffn=768, experts=128, top_k=8, tokens=8192)  # of Qwen3-30B-A3B
SPREAD = Shape(hidden=512, ffn=1024, experts=8, top_k=2, tokens=2048, ranks=2)
CARD = Shape(hidden=4096, ffn=1536, experts=128, top_k=8, tokens=8192, ranks=8)  # of Qwen3-235B
FULL = Scale(ALONE, SPREAD, CARD, (1.5, 2.0, 3.0), 21, 5)
QUICK = Scale(ALONE, SPREAD, CARD, (2.0,), 9, 5)
TOY = Scale(
    Shape(hidden=16, ffn=16, experts=4, top_k=2, tokens=8),
    Shape(hidden=16, ffn=32, experts=8, top_k=2, tokens=64, ranks=2),
    Shape(hidden=16, ffn=32, experts=8, top_k=2, tokens=64, ranks=2),
    (1.2,),
    rounds=2,
    steps=1,
)
SMS = 16  # multiprocessors per rank


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
    shape, clock = bench.scale.alone, bench.clock
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


def on_rank(rank: int, shape: Shape, rounds: int) -> dict[str, Facts]:
    """Time all variants in turn, in one process; the slowest rank counts."""
    skewed, even = skewed_ids(shape, RATIO), even_ids(shape)
    plain = block(shape, torch.device("cpu"), torch.float32)
    made = {policy: copy.deepcopy(plain) for policy in ("none", "ultraep")}
    owners = {policy: balance(made[policy], policy=policy) for policy in made}
    tokens = torch.randn(shape.tokens, shape.hidden, generator=torch.Generator().manual_seed(rank))
    run = {policy: Step(made[policy], tokens[None]) for policy in made}
    variants = {"none": (skewed, "none"), "ultraep": (skewed, "ultraep"), FORCED: (even, "none")}

    def step(name: str) -> None:
        ids, policy = variants[name]
        made[policy].gate = FixedChoices(ids[rank], torch.float32)
        owners[policy].reset_stats()
        run[policy]()

    def imbalance(name: str) -> tuple[float, float]:
        stats = owners[variants[name][1]].stats()
        return stats["imbalance_before"], stats["imbalance_after"]

    return timed_steps(
        {name: partial(step, name) for name in variants}, rounds, imbalance, warmup=2
    )


def gain(bench: Bench) -> None:
    """Measure tokens per second of two ranks."""
    shape = bench.scale.spread
    facts = on_ranks(shape.ranks, on_rank, shape, bench.scale.rounds)
    bench.table("a block in processes, forward and backward", gain_lines(shape, facts))


def card(bench: Bench) -> None:
    """Measure tokens per second of eight ranks on one GPU."""
    shape, clock, rounds = bench.scale.card, bench.clock, bench.scale.rounds
    blocks = Blocks(shape, lambda: block(shape, clock.device, clock.dtype), clock.device, SMS)
    loads = [HotRank(ratio) for ratio in bench.scale.hot]
    forced = blocks.run(loads[0], FORCED, rounds)
    lines = []
    for load in loads:
        steps = {policy: blocks.run(load, policy, rounds) for policy in ("none", "ultraep")}
        for got, want in zip(steps["ultraep"].outputs, steps["none"].outputs, strict=True):
            check_close(load.name, got, want)
        for policy, step in (steps | {FORCED: forced}).items():
            values: Values = {
                **step_values(shape, step.ms, steps["none"].ms),
                SHARE: forced.ms / step.ms,
                **plan_values(step.plan),
            }
            lines.append(Line({"load": load.name, "policy": policy}, values))
    blocks.close()
    about = f"{shape.about}, {shape.tokens} tokens per rank, EP{shape.ranks}"
    bench.table(f"the library's own experts, forward and backward; {about}", lines)


SECTIONS = {"overhead": overhead, "card": card, "gain": gain}
NEEDS = {"overhead": KERNELS, "card": KERNELS, "gain": CPU}


if __name__ == "__main__":
    scales = {"toy": TOY, "quick": QUICK, "full": FULL}
    main("transformers", __doc__, SECTIONS, scales, needs=NEEDS)
