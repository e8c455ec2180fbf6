"""Servers and layers that are not balanced, and why. SGLang then runs unmodified.

The decisions depend only on values that are the same on all ranks. This module does not import
SGLang; its arguments and layers are parameters.
"""

from __future__ import annotations

from typing import Any

from ultraep.integrations.serving.tensors import tensors_without_bundle

SGLANG_LOGGER = "ultraep"
# Quantisation methods whose experts are their tensors `w13_...` and `w2_...` and nothing else.
METHODS = ("Fp8MoEMethod", "UnquantizedFusedMoEMethod")
# Kernels that accept rows from any dispatcher and any number of experts.
RUNNERS = ("deep_gemm", "triton")


def reasons_of_server(arguments: Any) -> list[str]:
    """Return why no layer of this server is balanced; empty if all are.

    arguments: SGLang's `ServerArgs`, resolved.
    """
    tensor, attention = arguments.tp_size, arguments.attn_dp_size
    experts, backend = arguments.ep_size, arguments.moe_a2a_backend
    location = arguments.init_expert_location
    conditions = {
        f"--moe-a2a-backend {backend}: layers get the tokens of all ranks; use deepep": (
            backend != "deepep"
        ),
        f"--tp-size {tensor}: there is only one rank": tensor < 2,
        f"--ep-size {experts}: use {tensor}, the --tp-size": experts != tensor,
        "no --attn-dp-size: SGLang does not share the token counts of all ranks": (attention < 2),
        f"--pp-size {arguments.pp_size}": arguments.pp_size > 1,
        f"--moe-dp-size {arguments.moe_dp_size}": (arguments.moe_dp_size or 1) > 1,
        "two-batch overlap bypasses the layer: omit --enable-two-batch-overlap": (
            arguments.enable_two_batch_overlap
        ),
        "single-batch overlap bypasses the layer: omit --enable-single-batch-overlap": (
            arguments.enable_single_batch_overlap
        ),
        "EPLB (--enable-eplb) moves experts itself": arguments.enable_eplb,
        f"--ep-num-redundant-experts {arguments.ep_num_redundant_experts}: SGLang replicates "
        "experts itself": arguments.ep_num_redundant_experts > 0,
        f"--init-expert-location {location}: SGLang places experts itself": location != "trivial",
        "waterfill (--enable-waterfill) replicates shared experts": arguments.enable_waterfill,
        "elastic expert parallelism changes the ranks": arguments.elastic_ep_backend is not None,
        "paged experts (--enable-paged-experts) are not in memory": arguments.enable_paged_experts,
        "--enable-memory-saver unmaps the weights that replicas are copied from": (
            arguments.enable_memory_saver
        ),
        "LoRA (--enable-lora): replicas would lack the adapters of their experts": bool(
            arguments.enable_lora or arguments.lora_paths
        ),
        f"speculative decoding ({arguments.speculative_algorithm}) is not tested": (
            arguments.speculative_algorithm is not None
        ),
    }
    return [reason for reason, holds in conditions.items() if holds]


def reasons_of_layer(layer: Any) -> list[str]:
    """Return why this layer, with its weights loaded, is not balanced; empty if it is."""
    name, method = layer.layer_name, layer.quant_method
    quantisation, backend = type(method).__name__, layer.runner_backend
    if quantisation not in METHODS:
        return [f"{name} is quantised by {quantisation}, which has no bundle"]
    runner = None if backend is None else backend.value
    in_blocks = quantisation != "Fp8MoEMethod" or method.block_quant
    without_bundle = tensors_without_bundle(layer, layer.num_local_experts)
    conditions = {
        f"{name} runs on {runner}: use --moe-runner-backend {' or '.join(RUNNERS)}": (
            runner not in RUNNERS
        ),
        f"{name} is quantised by {quantisation} without block scales": not in_blocks,
        f"{name} is quantised to FP4": getattr(method, "is_fp4_expert", False),
        f"{name} has tensors without a bundle: {', '.join(without_bundle)}": bool(without_bundle),
        f"{name} has {layer.num_fused_shared_experts} shared experts among the routed ones: use "
        "--disable-shared-experts-fusion": layer.num_fused_shared_experts > 0,
        f"{name} multiplies its inputs by gates": (
            layer.moe_runner_config.apply_router_weight_on_input
        ),
        f"{name} does not sum the outputs of a token": layer.moe_runner_config.no_combine,
        f"{name} splits experts over {layer.moe_tp_size} ranks": layer.moe_tp_size > 1,
    }
    return [reason for reason, holds in conditions.items() if holds]
