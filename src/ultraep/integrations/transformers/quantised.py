"""Experts that transformers has quantised: FP8 and MXFP4, balanced without dequantising.

Their codes and scales travel as raw bytes, and the library's kernels multiply them. FP8 weights
(`FP8Experts`) are parameters like others. MXFP4 weights (`Mxfp4GptOssExperts`) are tensors of the
library's Triton kernels; a bundle holds their memory, expert by expert.

Shapes: E experts, n rows, D model width, N and K of a weight.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import torch
import transformers.integrations.finegrained_fp8 as fp8
import transformers.integrations.mxfp4 as mxfp4

from ultraep.comm import moved
from ultraep.errors import ConfigError
from ultraep.integrations.common import Overlay

FP8Experts: Any = fp8.FP8Experts
Mxfp4Experts: Any = mxfp4.Mxfp4GptOssExperts
# The method that takes the library's routing; since 5.23, `forward` takes expert ids.
MXFP4_ROUTED = "forward_routed" if hasattr(Mxfp4Experts, "forward_routed") else "forward"
QUANTISED = (FP8Experts, Mxfp4Experts)
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
FP4_GROUP = 32  # numbers of a row that share a scale
OWN_DISPATCH = "deepgemm_megamoe"  # an implementation that sends rows between ranks itself
METHODS = ("fp8", "mxfp4")  # names of the library
SUPPORTED = "FineGrainedFP8Config and Mxfp4Config"


def quantiser_of(model: Any) -> str | None:
    """Return the quantisation method of a model; None: it is not quantised."""
    method = getattr(model, "quantization_method", None)
    return None if method is None else str(getattr(method, "value", method))


# FP8


def check_fp8(name: str, experts: Any) -> None:
    """Raise if scales do not fit their weights, or if the implementation cannot be used."""
    check_implementation(name, experts)
    implementation = experts.config._experts_implementation
    if experts.activation_scheme == "static" and implementation not in (None, "eager"):
        raise ConfigError(
            f"{name!r} has activation_scheme='static', which experts_implementation="
            f"{implementation!r} of the library does not support: use 'eager'"
        )
    for key in WEIGHTS:
        weight, scales = (getattr(experts, f"{key}{end}", None) for end in ("", "_scale_inv"))
        if weight is None or weight.dtype.itemsize > 1:
            continue
        expected = _scale_shape(key, weight, experts.block_size)
        if scales is None or tuple(scales.shape) != expected:
            shape = None if scales is None else list(scales.shape)
            raise ConfigError(
                f"'{name}.{key}_scale_inv' must be {list(expected)} for weights "
                f"{list(weight.shape)} in blocks of {experts.block_size}, got {shape}: load the "
                "scales of this checkpoint"
            )


def check_implementation(name: str, experts: Any) -> None:
    """Raise if the implementation of the experts sends rows between ranks itself."""
    config = getattr(experts, "config", None)
    if getattr(config, "_experts_implementation", None) == OWN_DISPATCH:
        raise ConfigError(
            f"{name!r} uses experts_implementation={OWN_DISPATCH!r}, which sends rows between "
            "ranks itself: use 'grouped_mm', 'batched_mm', 'deepgemm' or 'eager'"
        )


def check_native(experts: Any) -> None:
    """Raise if the library's own expert parallelism of these experts cannot be balanced."""
    check_implementation(type(experts).__name__, experts)
    if isinstance(experts, Mxfp4Experts) and MXFP4_ROUTED == "forward":
        raise ConfigError("enable() of MXFP4 experts needs transformers 5.23: use balance(model)")


def freeze_fp8(experts: Any) -> None:
    """Freeze FP8 weights and scales: the library makes them trainable, but has no gradients."""
    if isinstance(experts, FP8Experts):
        experts.requires_grad_(False)


def _scale_shape(key: str, weight: torch.Tensor, block: Any) -> tuple[int, ...]:
    experts, rows, columns = weight.shape
    if weight.dtype == torch.int8:  # two FP4 numbers in a byte
        return experts, rows, -(-2 * columns // FP4_GROUP)
    height, width = block or (rows, columns)
    least = 2 if key == "gate_up_proj" else 1  # one scale at least for each half
    return experts, max(least, -(-rows // height)), -(-columns // width)


def fp8_product(
    experts: Any, name: str, rows: torch.Tensor, counts: list[int], ends: torch.Tensor
) -> torch.Tensor:
    """Multiply `[n, K]` rows, sorted by expert, with the library's grouped FP8 kernel."""
    weight, scales = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
    each = moved(torch.tensor(counts, dtype=torch.int32), rows.device)
    differentiable = getattr(fp8, "FP8GroupedMatmulFunction", None)  # since 5.22
    product: torch.Tensor
    if differentiable is not None and torch.is_grad_enabled() and rows.requires_grad:
        product = differentiable.apply(rows, weight, scales, ends, each, experts.block_size)
    else:
        named = {"offsets": ends, "tokens_per_expert": each, "block_size": experts.block_size}
        product = fp8.load_finegrained_fp8_kernel().grouped_matmul(rows, weight, scales, **named)
    return product


# MXFP4


def triton_tensors(experts: Any) -> dict[str, Any]:
    """Return the Triton tensors of MXFP4 experts by name; empty before the weights are loaded."""
    tensors = {}
    for key in ("gate_up_proj", "down_proj"):
        precision = getattr(experts, f"{key}_precision_config")
        if precision is not None:
            tensors[key] = getattr(experts, key)
            tensors[f"{key}_scales"] = precision.weight_scale
    return tensors


def memory_of(tensor: Any) -> torch.Tensor:
    """Return the memory of a Triton tensor, contiguous within each expert."""
    data: torch.Tensor = tensor.storage.data
    return data if data.stride(-1) == 1 else data.mT


def with_memory(experts: Any, memory: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the attributes of MXFP4 experts whose Triton tensors, if loaded, have other memory."""
    attributes: dict[str, Any] = {}
    for name, tensor in triton_tensors(experts).items():
        data = memory[name]
        changed = copy(tensor)
        changed.storage = copy(tensor.storage)
        changed.storage.data = data if tensor.storage.data.stride(-1) == 1 else data.mT
        changed.shape = torch.Size([len(data), *tensor.shape[1:]])
        changed.shape_max = [len(data), *tensor.shape_max[1:]]
        attributes[name] = changed
    for key in ("gate_up_proj", "down_proj") if memory else ():
        config = f"{key}_precision_config"
        attributes[config] = replace(
            getattr(experts, config), weight_scale=attributes.pop(f"{key}_scales")
        )
    return attributes


def stored_mxfp4(experts: Any) -> dict[str, torch.Tensor]:
    """Return blocks and scales of MXFP4 experts as checkpoints store them."""
    stored = {}
    for key in ("gate_up_proj", "down_proj"):
        blocks, scales = (
            tensor.storage.layout.unswizzle_data(tensor.storage.data).mT
            for tensor in (triton_tensors(experts)[n] for n in (key, f"{key}_scales"))
        )
        stored[f"{key}_blocks"] = blocks.reshape(*scales.shape, -1)
        stored[f"{key}_scales"] = scales
    return stored


def mxfp4_choices(routing: Any, gather: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[T, K]` expert ids and gates of the library's routing, which sorts by expert."""
    order, hist = gather.src_indx.long(), routing.expt_hist
    experts = torch.arange(len(hist), device=order.device)
    ids, gates = torch.empty_like(order), torch.empty_like(routing.gate_scal)
    ids[order] = experts.repeat_interleave(hist, output_size=len(order))
    gates[order] = routing.gate_scal
    return ids.view(-1, routing.n_expts_act), gates.view(-1, routing.n_expts_act)


def mxfp4_network(
    experts: Any, rows: torch.Tensor, counts: list[int], tensors: dict[str, Any]
) -> torch.Tensor:
    """Run the library's MXFP4 experts on `[n, D]` rows with these tensors, `counts` rows each."""
    biases = {name: tensors[name] for name in ("gate_up_proj_bias", "down_proj_bias")}
    overlay = Overlay(experts, **with_memory(experts, tensors), **biases)
    hub, device = mxfp4.triton_kernels_hub.routing, rows.device
    hist = moved(torch.tensor(counts, dtype=torch.int32), device)
    order = torch.arange(len(rows), dtype=torch.int32, device=device)
    data = hub.compute_expt_data(hist, len(counts), len(rows))
    routing = hub.RoutingData(rows.new_ones(len(rows)), hist, len(counts), 1, data)
    outputs: torch.Tensor = getattr(experts.original_class, MXFP4_ROUTED)(
        overlay, rows, routing, hub.GatherIndx(order, order), hub.ScatterIndx(order, order)
    )
    return outputs
