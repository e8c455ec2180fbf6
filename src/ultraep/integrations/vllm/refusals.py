"""Engines, layers and batches that are not balanced, and why. vLLM then runs unmodified.

The decisions depend only on values that are the same on all ranks. This module does not import
vLLM; its configuration and layers are arguments.
"""

from __future__ import annotations

from typing import Any

import torch

from ultraep.integrations.serving.tensors import tensors_without_bundle

VLLM_LOGGER = "vllm.ultraep"  # a child of vLLM's logger, so that its handlers print it
# Quantisation methods whose experts are their tensors `w13_...` and `w2_...` and nothing else.
METHODS = (
    "CompressedTensorsW4A4Mxfp4MoEMethod",
    "CompressedTensorsW4A4Nvfp4MoEMethod",
    "CompressedTensorsW8A8Fp8MoEMethod",
    "CompressedTensorsW8A8Int8MoEMethod",
    "CompressedTensorsWNA16MoEMethod",
    "Fp8MoEMethod",
    "Fp8PerBlockOnlineMoEMethod",
    "Fp8PerTensorOnlineMoEMethod",
    "Fp8PtpcOnlineMoEMethod",
    "GptOssMxfp4MoEMethod",
    "Int8OnlineMoEMethod",
    "ModelOptNvFp4FusedMoE",
    "Mxfp4MoEMethod",
    "Mxfp4OnlineMoEMethod",
    "Mxfp8OnlineMoEMethod",
    "Nvfp4OnlineMoEMethod",
    "QuarkOCP_MX_MoEMethod",
    "UnquantizedFusedMoEMethod",
)
# Kernels that accept rows from any dispatcher and any number of experts.
KERNELS = (
    "ArmCPUExpertsInt8",
    "CPUExpertsFp8",
    "CPUExpertsFp8W8A8",
    "CPUExpertsInt4",
    "CPUExpertsInt8",
    "CPUExpertsMxfp4",
    "CPUUnquantizedExperts",
    "CutlassExpertsFp4",
    "CutlassExpertsMxfp4",
    "DeepGemmExperts",
    "DeepGemmFP4Experts",
    "MarlinExperts",
    "TritonExperts",
    "TritonOrDeepGemmExperts",
)
# Back ends whose kernels accept rows only from their own dispatcher.
BACKENDS = {
    "deepep_low_latency": "its kernels need rows in batches of equal size",
    "nixl_ep": "its kernels need rows in batches of equal size",
    "moonep": "it replicates experts itself",
    "passthrough": "its kernels dispatch rows themselves",
}
WITHOUT_DRAFT_MODEL = ("ngram", "ngram_gpu", "suffix")  # methods of speculative decoding


def reasons_of_engine(config: Any) -> list[str]:
    """Return why no layer of this engine is balanced; empty if all are."""
    parallel, model = config.parallel_config, config.model_config
    data, tensor = parallel.data_parallel_size, parallel.tensor_parallel_size
    pipeline, context = parallel.pipeline_parallel_size, parallel.prefill_context_parallel_size
    backend, speculative = parallel.all2all_backend, config.speculative_config
    draft = speculative.method if speculative else None
    conditions = {
        "no --enable-expert-parallel": not parallel.enable_expert_parallel,
        f"--data-parallel-size {data}: there is only one rank": data < 2,
        f"--tensor-parallel-size {tensor}: several ranks have the same tokens": tensor > 1,
        f"--pipeline-parallel-size {pipeline}": pipeline > 1,
        f"--prefill-context-parallel-size {context}": context > 1,
        "EPLB (--enable-eplb) moves experts itself": parallel.enable_eplb,
        "elastic expert parallelism changes the ranks": parallel.enable_elastic_ep,
        "dual batch overlap runs two batches of a layer at the same time: omit --enable-dbo": (
            parallel.use_ubatching
        ),
        "cudagraph_mode FULL captures prefill batches, and replays do not plan: use "
        "FULL_AND_PIECEWISE": config.compilation_config.cudagraph_mode.name == "FULL",
        "sleep mode unmaps the weights that replicas are copied from": model.enable_sleep_mode,
        "LoRA (--enable-lora): replicas would lack the adapters of their experts": (
            config.lora_config is not None
        ),
        f"speculative decoding ({draft}): draft models are not tested": (
            speculative is not None and draft not in WITHOUT_DRAFT_MODEL
        ),
        f"--all2all-backend {backend}: {BACKENDS.get(backend)}": backend in BACKENDS,
    }
    return [reason for reason, holds in conditions.items() if holds]


def reasons_of_layer(layer: Any, homes: list[int]) -> list[str]:
    """Return why this layer, with its weights loaded, is not balanced; empty if it is.

    homes: home rank of every expert, as placed by vLLM.
    """
    name, method = layer.layer_name, layer.quant_method
    if not _is_one_of(method, METHODS):
        return [f"{name} is quantised by {type(method).__name__}, which has no bundle"]
    if method.moe_kernel is None:
        return [f"{name} has no modular kernel"]
    kernel = method.moe_kernel.fused_experts
    kernel_name, state = type(kernel).__name__, _tensors_of_kernel(kernel)
    shared = layer.expert_map_manager.num_fused_shared_experts
    without_bundle = tensors_without_bundle(layer, layer.local_num_experts)
    conditions = {
        f"{name} runs on {kernel_name}, which routes tokens itself": method.is_monolithic,
        f"{name} runs on {kernel_name}: use {', '.join(KERNELS)}": not _is_one_of(kernel, KERNELS),
        f"{name} runs on {kernel_name}, which keeps data of all its experts: {', '.join(state)}": (
            bool(state)
        ),
        f"{name} has tensors without a bundle: {', '.join(without_bundle)}": bool(without_bundle),
        f"{name} has {shared} shared experts among the routed ones": shared > 0,
        f"{name} holds other experts than its placement says": not _is_at_home(layer, homes),
    }
    return [reason for reason, holds in conditions.items() if holds]


def _is_one_of(instance: Any, names: tuple[str, ...]) -> bool:
    """Return whether a class of the instance has one of these names."""
    return any(cls.__name__ in names for cls in type(instance).__mro__)


def _tensors_of_kernel(kernel: Any) -> list[str]:
    """Return the tensors that the kernel holds apart from its quantisation configuration."""
    return [name for name, value in vars(kernel).items() if isinstance(value, torch.Tensor)] + [
        name
        for nested in vars(kernel).values()
        if _is_one_of(nested, KERNELS)
        for name in _tensors_of_kernel(nested)
    ]


def _is_at_home(layer: Any, homes: list[int]) -> bool:
    """Return whether this rank holds the experts that `homes` assigns to it, in order."""
    rank, places = layer.moe_config.moe_parallel_config.ep_rank, layer._expert_map
    mine = [expert for expert, home in enumerate(homes) if home == rank]
    held = range(len(mine)) if places is None else [int(places[expert]) for expert in mine]
    return list(held) == list(range(layer.local_num_experts))
