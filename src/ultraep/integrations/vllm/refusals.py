"""Engines, layers and batches that are not balanced, and why. vLLM then runs unmodified.

The decisions depend only on values that are the same on all ranks. This module does not import
vLLM; its configuration and layers are arguments.
"""

from __future__ import annotations

from math import ceil
from typing import Any

BACKEND = "allgather_reducescatter"  # its kernels accept rows from any dispatcher
METHOD = "UnquantizedFusedMoEMethod"
# Kernels that accept any number of experts and need only the tensors of the bundle.
KERNELS = ("CPUUnquantizedExperts", "TritonExperts")
TENSORS = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")
OF_ROUTER = ("e_score_correction_bias",)  # stored in the layer, but not part of an expert

# Operations that a rank performs while one byte of an expert arrives, rounded: float32 on one core
# beside shared memory, and bfloat16 on a GPU beside NVLink.
OPERATIONS_PER_BYTE = {"cpu": 8.0, "cuda": 2000.0}


def reasons_of_engine(config: Any) -> list[str]:
    """Return why no layer of this engine is balanced; empty if all are."""
    parallel, model = config.parallel_config, config.model_config
    data, tensor = parallel.data_parallel_size, parallel.tensor_parallel_size
    pipeline, context = parallel.pipeline_parallel_size, parallel.prefill_context_parallel_size
    backend = parallel.all2all_backend
    conditions = {
        "no --enable-expert-parallel": not parallel.enable_expert_parallel,
        f"--data-parallel-size {data}: there is only one rank": data < 2,
        f"--tensor-parallel-size {tensor}: several ranks have the same tokens": tensor > 1,
        f"--pipeline-parallel-size {pipeline}": pipeline > 1,
        f"--prefill-context-parallel-size {context}": context > 1,
        "EPLB (--enable-eplb) moves experts itself": parallel.enable_eplb,
        "elastic expert parallelism changes the ranks": parallel.enable_elastic_ep,
        "dual batch overlap (--enable-dbo)": parallel.use_ubatching,
        "CUDA graphs and compiled layers cannot plan on the host: use --enforce-eager": (
            not model.enforce_eager
        ),
        "sleep mode frees weights": model.enable_sleep_mode,
        "LoRA (--enable-lora) may change experts": config.lora_config is not None,
        "speculative decoding uses a second model": config.speculative_config is not None,
        f"--all2all-backend {backend}: use {BACKEND}": backend != BACKEND,
    }
    return [reason for reason, holds in conditions.items() if holds]


def reasons_of_layer(layer: Any, homes: list[int]) -> list[str]:
    """Return why this layer, with its weights loaded, is not balanced; empty if it is.

    homes: home rank of every expert, as placed by vLLM.
    """
    name, method = layer.layer_name, type(layer.quant_method).__name__
    if method != METHOD:
        return [f"{name} is quantised by {method}, and replicas may lack its scales"]
    kernel = layer.quant_method.moe_kernel
    classes = [cls.__name__ for cls in type(kernel and kernel.fused_experts).__mro__]
    shared = layer.expert_map_manager.num_fused_shared_experts
    unknown = [t for t, _ in layer.named_parameters() if t not in (*TENSORS, *OF_ROUTER)]
    conditions = {
        f"{name} runs on {classes[0]}: use {' or '.join(KERNELS)}": (
            not set(classes) & set(KERNELS)
        ),
        f"{name} has unknown tensors: {', '.join(unknown)}": bool(unknown),
        f"{name} has {shared} shared experts among the routed ones": shared > 0,
        f"{name} holds other experts than its placement says": not _is_at_home(layer, homes),
    }
    return [reason for reason, holds in conditions.items() if holds]


def _is_at_home(layer: Any, homes: list[int]) -> bool:
    """Return whether this rank holds the experts that `homes` assigns to it, in order."""
    rank, places = layer.moe_config.moe_parallel_config.ep_rank, layer._expert_map
    mine = [expert for expert, home in enumerate(homes) if home == rank]
    held = range(len(mine)) if places is None else [int(places[expert]) for expert in mine]
    return list(held) == list(range(layer.local_num_experts))


def rows_to_pay(nbytes: int, parameters: int, device: str) -> int:
    """Return the rows that a replica must serve to save more time than its transfer takes.

    A transfer takes `nbytes` over the link; each row saves two operations per parameter. The
    result is 16 rows for float32 on CPUs and 2000 rows for bfloat16 on GPUs.

    >>> rows_to_pay(nbytes=4_000, parameters=1_000, device="cpu")
    16
    """
    per_byte = OPERATIONS_PER_BYTE.get(device, OPERATIONS_PER_BYTE["cuda"])
    return max(1, ceil(nbytes / (2 * parameters) * per_byte))


def least_tokens(rows: int, ranks: int, top_k: int) -> int:
    """Return the tokens of all ranks for which a rank has `rows` rows on average.

    Smaller batches, mostly decoding, are not balanced.

    >>> least_tokens(rows=16, ranks=4, top_k=8)
    8
    """
    return ceil(rows * ranks / top_k)
