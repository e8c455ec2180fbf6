"""A layer with FP8 experts compared with one in bfloat16, in the same run.

    python benchmarks/bench_fp8.py                  # needs a GPU; a minute
    python benchmarks/bench_fp8.py --toy            # tiny, for CI; also without a GPU

The variants alternate; times are medians over rounds. Errors are relative norms against bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from grouped_mlp import DEEPSEEK, QWEN3, TINY, Model, drawer
from harness import KERNELS, Bench, Line, Metric, Values, main
from layers import FixedRouter, distance, layer_with_weights
from timing import Call, alternating_ms, captured, free
from torch import nn

import ultraep

PLAIN, TRAINED, FROZEN = "bf16", "fp8, trained", "fp8, frozen"

TIME = Metric("time_p50", "ms", "ms", ".3f")
RATE = Metric("rate", "TFLOP/s", "TFLOP/s", ".0f")
SPEED = Metric("speed_over_bf16", "ratio", "over bf16", ".2f")
ERROR = Metric("error", "ratio", "error", ".4f")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Models with slots, rows per slot, rounds, and calls per round."""

    models: tuple[tuple[Model, int], ...]
    rows: int
    top_k: int
    rounds: int
    calls: int


MODELS = ((QWEN3, 16), (DEEPSEEK, 16))
FULL = Scale(models=MODELS, rows=4096, top_k=8, rounds=7, calls=3)
QUICK = Scale(models=MODELS[:1], rows=4096, top_k=8, rounds=5, calls=3)
TOY = Scale(models=((TINY, 4),), rows=8, top_k=2, rounds=1, calls=1)


def measured(bench: Bench, calls: Mapping[str, Call]) -> dict[str, float]:
    """Median milliseconds per call of each variant; the variants alternate."""
    for call in calls.values():
        call()
    return alternating_ms(bench.clock, calls, bench.scale.rounds, bench.scale.calls)


def values_of(ms: float, plain: float, flops: int) -> Values:
    return {TIME: ms, RATE: flops / ms / 1e9, SPEED: plain / ms}


def layer(bench: Bench) -> None:
    """Time a whole layer of one rank: forward without gradients, and a training step."""
    for model, slots in bench.scale.models:
        top_k = bench.scale.top_k
        tokens = slots * bench.scale.rows // top_k
        lines = layer_lines(bench, model, slots, tokens, top_k)
        bench.table(f"EP1, {tokens} tokens, top {top_k}; D {model.width}, F {model.ffn}", lines)
        free()


def layer_lines(bench: Bench, model: Model, slots: int, tokens: int, top_k: int) -> list[Line]:
    draw, device = drawer(bench.clock), bench.clock.device
    x, dy = draw(tokens, model.width), draw(tokens, model.width)
    best, ids = torch.rand(tokens, slots, device=device).topk(top_k, dim=1)
    weights = {
        "gate_up_proj": draw(slots, 2 * model.ffn, model.width).mul_(model.width**-0.5),
        "down_proj": draw(slots, model.width, model.ffn).mul_(model.ffn**-0.5),
    }
    moes: dict[str, Any] = {}
    for name in (PLAIN, TRAINED, FROZEN):
        balancer = ultraep.Balancer(
            "alone", experts=slots, data_plane="mapped" if x.is_cuda else "messages"
        )
        router = FixedRouter(ids, best / best.sum(dim=1, keepdim=True))
        moes[name] = layer_with_weights(balancer, router, weights, None if name == PLAIN else "fp8")
    moes[FROZEN].experts.freeze()
    leaf = x.clone().requires_grad_()

    def forward(moe: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            y: torch.Tensor = moe(x)
        return y

    def step(moe: nn.Module) -> None:
        leaf.grad = None
        for parameter in moe.parameters():
            parameter.grad = None
        moe(leaf).backward(dy)

    expected, flops = forward(moes[PLAIN]).clone(), model.flops(tokens * top_k)
    errors = {name: distance(forward(moe), expected) for name, moe in moes.items()}
    works: list[tuple[str, Callable[[nn.Module], Any], bool]] = [("forward", forward, False)]
    if bench.on_gpu:
        works.append(("forward, in a graph", forward, True))
    lines = []
    for work, run, in_graph in (*works, ("forward, backward", step, False)):
        chosen = [name for name in moes if run is forward or name != FROZEN]
        calls: dict[str, Call] = {name: partial(run, moes[name]) for name in chosen}
        if in_graph:
            calls = {name: captured(call, 1)[0].replay for name, call in calls.items()}
        times = measured(bench, calls)
        for name, ms in times.items():
            case = {"model": model.name, "work": work, "path": name}
            speeds = values_of(ms, times[PLAIN], flops * (3 if run is step else 1))
            lines.append(Line(case, {**speeds, ERROR: errors[name] if run is forward else None}))
    return lines


if __name__ == "__main__":
    scales = {"toy": TOY, "quick": QUICK, "full": FULL}
    main("fp8", __doc__, {"layer": layer}, scales, needs=KERNELS)
