"""The gain of balancing for a MoE layer of Megatron-Core in two processes, forward and backward.

    python benchmarks/bench_megatron.py                  # EP2 on two cores; two minutes
    python benchmarks/bench_megatron.py --toy            # tiny, for CI

One pinned core and one thread per rank, imbalance 1.6. `unmodified` is the library's own layer with
its all-to-all; `none` and `ultraep` are balanced layers with these policies. Forced balance is the
library's flag moe_router_force_load_balancing (random routing) in the layer of `none`. The variants
alternate; outputs and gradients are compared before the timing. `cpu ms` is the CPU time of the
busiest rank; on a busy machine it is more reliable than the time of a step.

Shapes: T tokens of a rank, K experts per token, E experts, D model width.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the library would compile small functions, for GPUs
warnings.filterwarnings("ignore")  # the library warns about packages that are not installed
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import torch
from harness import Bench, main
from layers import FORCED, PLAIN, RATIO, Facts, Step, check_close, gain_lines, on_ranks, timed_steps
from load_cases import Shape, skewed_ids
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_on_cpu import on_cpu  # type: ignore[import-not-found]

from ultraep.integrations.megatron import balanced


@dataclass(frozen=True)
class Scale:
    """What one run measures."""

    shape: Shape
    rounds: int


SPREAD = Shape(hidden=512, ffn=1024, experts=8, top_k=2, tokens=2048, ranks=2)
FULL, QUICK = Scale(SPREAD, 21), Scale(SPREAD, 7)
TOY = Scale(Shape(hidden=16, ffn=32, experts=8, top_k=2, tokens=64, ranks=2), rounds=2)


class FixedRouter(TopKRouter):  # type: ignore[misc]
    """A router with fixed choices, unless the library forces balance."""

    ids = torch.empty(0)

    def routing(self, logits: torch.Tensor, **options: Any) -> Any:
        if self.config.moe_router_force_load_balancing:
            return super().routing(logits, **options)
        logits = logits.view(-1, logits.shape[-1])
        chosen = torch.zeros(logits.shape, dtype=torch.bool).scatter(1, self.ids, True)
        return logits.masked_fill(~chosen, -torch.inf).softmax(dim=-1), chosen


def configured(shape: Shape) -> Any:
    return TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=4,
        num_moe_experts=shape.experts,
        moe_router_topk=shape.top_k,
        moe_ffn_hidden_size=shape.ffn,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=shape.ranks,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
    )


def make(config: Any, policy: str, ids: torch.Tensor) -> Any:
    """Create an unmodified or a balanced layer."""
    torch.manual_seed(3)
    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    spec.submodules.router = FixedRouter
    if policy != PLAIN:
        spec = balanced(spec, config, policy=policy)
    layer = build_module(spec, config=config)
    layer.set_layer_number(1)
    layer.router.ids = ids
    return layer


def on_rank(rank: int, shape: Shape, rounds: int) -> dict[str, Facts]:
    """Time all variants in turn, in one process; the slowest rank counts."""
    with on_cpu():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=shape.ranks)
        model_parallel_cuda_manual_seed(rank)
        config, ids = configured(shape), skewed_ids(shape, RATIO)[rank]
        draw = torch.Generator().manual_seed(rank)
        tokens = torch.randn(shape.tokens, 1, shape.hidden, generator=draw)
        layers = {policy: make(config, policy, ids) for policy in (PLAIN, "none", "ultraep")}
        steps = {policy: Step(layer, tokens) for policy, layer in layers.items()}
        for policy, step in steps.items():
            step()
            step.compare(policy, steps[PLAIN])
            grads = [[p.grad for p in s.layer.experts.parameters()] for s in (step, steps[PLAIN])]
            for mine, theirs in zip(*grads, strict=True):
                check_close(f"gradients of weights of {policy}", mine, theirs)

        def forced() -> None:
            steps["none"].layer.config.moe_router_force_load_balancing = True
            steps["none"]()
            steps["none"].layer.config.moe_router_force_load_balancing = False

        def imbalance(name: str) -> tuple[float, float]:
            if name == PLAIN:
                return RATIO, RATIO
            plan = layers["none" if name == FORCED else name].last_plan.to_host()
            return plan.initial_imbalance, plan.imbalance

        return timed_steps({**steps, FORCED: forced}, rounds, imbalance)


def gain(bench: Bench) -> None:
    """Measure tokens per second of two ranks."""
    shape = bench.scale.shape
    facts = on_ranks(shape.ranks, on_rank, shape, bench.scale.rounds)
    bench.table("a layer in processes, forward and backward", gain_lines(shape, facts))


if __name__ == "__main__":
    main("megatron", __doc__, {"gain": gain}, {"toy": TOY, "quick": QUICK, "full": FULL})
