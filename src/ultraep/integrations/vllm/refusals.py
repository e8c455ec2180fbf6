"""What is not balanced, and why: vLLM then does what it does without the plug-in.

A model that is refused is refused on all ranks alike: only what all ranks have alike decides.
"""

from __future__ import annotations

from dataclasses import dataclass

BACKEND = "allgather_reducescatter"  # whose kernels take rows as they are, from any dispatcher
METHOD = "UnquantizedFusedMoEMethod"
# Kernels that take as many experts as they are given, and nothing but what stands in the bundle.
KERNELS = ("CPUUnquantizedExperts", "TritonExperts")
TENSORS = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")
OF_ROUTER = ("e_score_correction_bias",)  # that the layer holds, and no expert


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """How vLLM was started, as far as it matters here."""

    data_parallel: int = 2
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: bool = True
    eplb: bool = False
    elastic: bool = False
    dual_batch: bool = False
    eager: bool = True
    sleep: bool = False
    lora: bool = False
    speculative: bool = False
    backend: str = BACKEND


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """What the experts of a layer are, and what computes them."""

    name: str
    method: str = METHOD
    kernel: tuple[str, ...] = KERNELS[:1]  # names of its class and of those it is derived from
    tensors: tuple[str, ...] = TENSORS[:2]
    fused_shared: int = 0  # shared experts among the routed ones
    homes_known: bool = True  # whether the experts are where their placement says


def reasons_of_engine(facts: EngineFacts) -> list[str]:
    """Why no layer is balanced; empty if nothing is against it."""
    against = {
        "no --enable-expert-parallel": not facts.expert_parallel,
        f"--data-parallel-size {facts.data_parallel}: there are no other ranks": (
            facts.data_parallel < 2
        ),
        f"--tensor-parallel-size {facts.tensor_parallel}: several ranks have the same tokens": (
            facts.tensor_parallel > 1
        ),
        f"--pipeline-parallel-size {facts.pipeline_parallel}": facts.pipeline_parallel > 1,
        f"--prefill-context-parallel-size {facts.context_parallel}": facts.context_parallel > 1,
        "EPLB (--enable-eplb) moves experts itself": facts.eplb,
        "elastic expert parallelism changes the ranks": facts.elastic,
        "dual batch overlap (--enable-dbo)": facts.dual_batch,
        "CUDA graphs and compiled layers do without the host, which plans: use --enforce-eager": (
            not facts.eager
        ),
        "sleep mode frees weights": facts.sleep,
        "LoRA (--enable-lora) may change experts": facts.lora,
        "speculative decoding has a model more": facts.speculative,
        f"--all2all-backend {facts.backend}: {BACKEND} is needed": facts.backend != BACKEND,
    }
    return [reason for reason, holds in against.items() if holds]


def reasons_of_layer(facts: LayerFacts) -> list[str]:
    """Why this layer is not balanced; empty if nothing is against it."""
    if facts.method != METHOD:
        return [
            f"{facts.name} is quantised by {facts.method}, and whether a copy has all of its "
            "scales is not known"
        ]
    against = {
        f"{facts.name} runs on {facts.kernel[0]}: {' or '.join(KERNELS)} is needed": (
            not set(facts.kernel) & set(KERNELS)
        ),
        f"{facts.name} has tensors that are not known: "
        f"{', '.join(t for t in facts.tensors if t not in TENSORS)}": (
            not set(facts.tensors) <= set(TENSORS)
        ),
        f"{facts.name} has {facts.fused_shared} shared experts among the routed ones": (
            facts.fused_shared > 0
        ),
        f"{facts.name} has other experts than its placement says": not facts.homes_known,
    }
    return [reason for reason, holds in against.items() if holds]
