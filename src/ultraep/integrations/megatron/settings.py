"""Check the settings of a TransformerConfig, and convert the output of its routers.

This module does not import Megatron-Core. Settings that are not listed here are supported.

Shapes: T local tokens, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ultraep.arrays import PADDING
from ultraep.errors import ConfigError
from ultraep.layer import Routing


class Refused(NamedTuple):
    """A setting, its supported values, and why others are refused."""

    setting: str
    supported: tuple[Any, ...]
    why: str


IN_GRAPHS = "experts read the row counts of a plan on the host, which a CUDA graph cannot capture"
SPLIT_ROWS = "scales that depend on all rows of an expert change when replicas serve some of them"
IN_PIECES = "it interleaves parts of a layer with another microbatch"
OFFLOADED = "backward restores replicas from their home rank, not from the host"

REFUSED = (
    Refused("expert_tensor_parallel_size", (None, 1), "each rank must hold whole experts"),
    Refused("moe_extended_tp", (False,), "each rank must hold whole experts"),
    Refused("fp8_param", (False,), "weights must be plain tensors, which each slot quantises"),
    Refused("fp4", (None,), SPLIT_ROWS),
    Refused("quant_recipe", (None,), "recipes of single modules cannot be checked"),
    Refused(
        "transformer_impl",
        ("transformer_engine", "local"),
        "its experts choose the dispatcher themselves",
    ),
    Refused(
        "moe_flex_dispatcher_backend",
        ("deepep", "hybridep"),
        "NCCL EP binds its buffers to the experts of the model",
    ),
    Refused("moe_expert_rank_capacity_factor", (None,), "it drops rows after planning"),
    Refused("moe_shared_expert_overlap", (False,), "it runs inside the library's dispatcher"),
    Refused("overlap_moe_expert_parallel_comm", (False,), IN_PIECES),
    Refused("delay_wgrad_compute", (False,), IN_PIECES),
    Refused("overlap_dispatch_backward_with_experts_wgrad", (False,), IN_PIECES),
    Refused("moe_single_grouped_weight", (False,), "a replica is bound to a weight of its own"),
    Refused("moe_single_grouped_bias", (False,), "a replica is bound to a bias of its own"),
    Refused("moe_paged_stash", (False,), "it needs operations that hold their weights themselves"),
    Refused("expert_gtp_weight_remat_size", (1,), "each rank must hold whole experts"),
    Refused("cuda_graph_impl", ("none",), IN_GRAPHS),
    Refused("enable_cuda_graph", (False,), IN_GRAPHS),
    Refused("external_cuda_graph", (False,), IN_GRAPHS),
    Refused("cpu_offloading", (False,), OFFLOADED),
    Refused("fine_grained_activation_offloading", (False,), OFFLOADED),
    Refused("moe_latent_size", (None,), "its projections were not tested"),
)
REFUSED_WITH_FP8 = (
    # Its scales depend on single rows, not on all rows of a gemm or on earlier steps. So do those
    # of "mxfp8", but it has not run on a GPU.
    Refused("fp8_recipe", ("blockwise",), SPLIT_ROWS),
    Refused(
        "moe_router_padding_for_quantization",
        (False,),
        "with fp8, experts pad the rows of every slot",
    ),
)
SET_BY_MEGATRON = ("group", "experts", "domain")


def check_settings(config: Any) -> None:
    """Raise if layers of this configuration cannot be balanced."""
    if not config.num_moe_experts:
        raise ConfigError("num_moe_experts is None: there are no experts to balance")
    with_fp8 = REFUSED_WITH_FP8 if getattr(config, "fp8", None) else ()
    for setting, supported, why in REFUSED + with_fp8:
        value = getattr(config, setting, supported[0])
        if value not in supported:
            allowed = " or ".join(repr(v) for v in supported if v is not None) or "None"
            raise ConfigError(f"{setting}={value!r} cannot be balanced, use {allowed}: {why}")


def check_options(options: Iterable[str]) -> None:
    """Raise if a balancer option is passed that Megatron-Core determines."""
    for name in options:
        if name in SET_BY_MEGATRON:
            raise ConfigError(
                f"{name!r} cannot be set: Megatron-Core spreads experts evenly over its own "
                "expert-parallel group"
            )


def pads(config: Any) -> bool:
    """Return whether routers pad experts with tokens of probability 0."""
    names = ("moe_pad_expert_input_to_capacity", "moe_router_padding_for_quantization")
    # DeepEP does not send choices of probability 0.
    flex = getattr(config, "moe_token_dispatcher_type", None) == "flex"
    return flex or any(getattr(config, name, False) for name in names)


def choices(probs_TE: torch.Tensor, map_TE: torch.Tensor, top_k: int, *, padded: bool) -> Routing:
    """Convert dense `[T, E]` maps to `[T, K]` ids and gates; missing choices become padding.

    padded: drop choices of probability 0, which only pad experts to their capacity.
    """
    chosen = probs_TE.detach().masked_fill(~map_TE, -1)
    if padded:
        chosen = chosen.masked_fill(chosen == 0, -1)
    best, ids = chosen.topk(min(top_k, probs_TE.shape[1]), dim=1)
    gates = probs_TE.gather(1, ids)
    return Routing(ids.masked_fill(best < 0, PADDING), gates, None)
