"""What is not balanced, and why: vLLM then runs as it does without the plug-in.

Only values that are the same on all ranks decide, so all ranks refuse a model alike. vLLM is not
imported here; its configuration and its layers are arguments.
"""

from __future__ import annotations

from typing import Any

BACKEND = "allgather_reducescatter"  # whose kernels take rows as they are, from any dispatcher
METHOD = "UnquantizedFusedMoEMethod"
# Kernels that take as many experts as they are given, and nothing but the tensors of the bundle.
KERNELS = ("CPUUnquantizedExperts", "TritonExperts")
TENSORS = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")
OF_ROUTER = ("e_score_correction_bias",)  # that the layer holds, and no expert


def reasons_of_engine(config: Any) -> list[str]:
    """Why no layer is balanced in vLLM with this configuration; empty if all of them are."""
    parallel, model = config.parallel_config, config.model_config
    data, tensor = parallel.data_parallel_size, parallel.tensor_parallel_size
    pipeline, context = parallel.pipeline_parallel_size, parallel.prefill_context_parallel_size
    backend = parallel.all2all_backend
    against = {
        "no --enable-expert-parallel": not parallel.enable_expert_parallel,
        f"--data-parallel-size {data}: there are no other ranks": data < 2,
        f"--tensor-parallel-size {tensor}: several ranks have the same tokens": tensor > 1,
        f"--pipeline-parallel-size {pipeline}": pipeline > 1,
        f"--prefill-context-parallel-size {context}": context > 1,
        "EPLB (--enable-eplb) moves experts itself": parallel.enable_eplb,
        "elastic expert parallelism changes the ranks": parallel.enable_elastic_ep,
        "dual batch overlap (--enable-dbo)": parallel.use_ubatching,
        "CUDA graphs and compiled layers do without the host, which plans: use --enforce-eager": (
            not model.enforce_eager
        ),
        "sleep mode frees weights": model.enable_sleep_mode,
        "LoRA (--enable-lora) may change experts": config.lora_config is not None,
        "speculative decoding has a model more": config.speculative_config is not None,
        f"--all2all-backend {backend}: {BACKEND} is needed": backend != BACKEND,
    }
    return [reason for reason, holds in against.items() if holds]


def reasons_of_layer(layer: Any, homes: list[int]) -> list[str]:
    """Why this layer, with its weights loaded, is not balanced; empty if it is.

    homes: the home rank of every expert, as vLLM places them.
    """
    name, method = layer.layer_name, type(layer.quant_method).__name__
    if method != METHOD:
        return [
            f"{name} is quantised by {method}, and whether a copy has all of its scales is not "
            "known"
        ]
    kernel = layer.quant_method.moe_kernel
    classes = [kind.__name__ for kind in type(kernel and kernel.fused_experts).__mro__]
    shared = layer.expert_map_manager.num_fused_shared_experts
    unknown = [t for t, _ in layer.named_parameters() if t not in (*TENSORS, *OF_ROUTER)]
    against = {
        f"{name} runs on {classes[0]}: {' or '.join(KERNELS)} is needed": (
            not set(classes) & set(KERNELS)
        ),
        f"{name} has tensors that are not known: {', '.join(unknown)}": bool(unknown),
        f"{name} has {shared} shared experts among the routed ones": shared > 0,
        f"{name} has other experts than its placement says": not _is_at_home(layer, homes),
    }
    return [reason for reason, holds in against.items() if holds]


def _is_at_home(layer: Any, homes: list[int]) -> bool:
    """Whether the experts that this rank holds are those that `homes` says, in that order."""
    rank, places = layer.moe_config.moe_parallel_config.ep_rank, layer._expert_map
    mine = [expert for expert, home in enumerate(homes) if home == rank]
    held = range(len(mine)) if places is None else [int(places[expert]) for expert in mine]
    return list(held) == list(range(layer.local_num_experts))
