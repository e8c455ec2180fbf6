"""Which settings of a TransformerConfig can be balanced, and what its routers return.

Megatron-Core is not imported here. A setting that is not listed works as before.

Shapes: T local tokens, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ultraep.arrays import PADDING
from ultraep.errors import ConfigError
from ultraep.routing import Routing


class Refused(NamedTuple):
    """A setting that is refused unless it has one of these values, and why."""

    setting: str
    fine: tuple[Any, ...]
    why: str


IN_GRAPHS = "a balanced layer plans on the host, which no CUDA graph captures"
IN_PIECES = "it runs a layer in pieces, between those of another microbatch"
QUANTISED = "the scales of an expert are not copied with its weights"
OFFLOADED = "copies are restored in backward from their home, not from the host"

REFUSED = (
    Refused("expert_tensor_parallel_size", (None, 1), "a rank must have whole experts"),
    Refused("moe_extended_tp", (False,), "a rank must have whole experts"),
    Refused("fp8", (None,), QUANTISED),
    Refused("fp4", (None,), QUANTISED),
    Refused(
        "moe_token_dispatcher_type",
        ("allgather", "alltoall"),
        "fused dispatchers (DeepEP, HybridEP) have their own way for rows",
    ),
    Refused("moe_enable_deepep", (False,), "a fused dispatcher has its own way for rows"),
    Refused("moe_shared_expert_overlap", (False,), "it runs inside of the library's dispatcher"),
    Refused("overlap_moe_expert_parallel_comm", (False,), IN_PIECES),
    Refused("delay_wgrad_compute", (False,), IN_PIECES),
    Refused("cuda_graph_impl", ("none",), IN_GRAPHS),
    Refused("enable_cuda_graph", (False,), IN_GRAPHS),
    Refused("external_cuda_graph", (False,), IN_GRAPHS),
    Refused("cpu_offloading", (False,), OFFLOADED),
    Refused("fine_grained_activation_offloading", (False,), OFFLOADED),
    Refused(
        "moe_latent_size", (None,), "it needs Transformer Engine, with which nothing is tested"
    ),
)
OWN = ("group", "experts", "homes", "domain", "communicator", "peers")  # of a balancer


def check_settings(config: Any) -> None:
    """Raise if layers of this configuration cannot be balanced; names the setting and its value."""
    if not config.num_moe_experts:
        raise ConfigError("num_moe_experts is None: there are no experts to balance")
    for setting, fine, why in REFUSED:
        value = getattr(config, setting, fine[0])
        if value not in fine:
            known = " or ".join(repr(one) for one in fine if one is not None) or "None"
            raise ConfigError(f"{setting}={value!r} cannot be balanced, {known} can: {why}")
    modules = getattr(config, "recompute_modules", None) or []
    if "moe_act" in modules:
        raise ConfigError(
            f"recompute_modules={modules!r} cannot be balanced, 'moe' can: 'moe_act' needs "
            "Transformer Engine, with which nothing is tested"
        )


def check_options(options: Iterable[str]) -> None:
    """Raise if an option of a balancer is given that Megatron-Core decides."""
    for name in options:
        if name in OWN:
            raise ConfigError(
                f"{name!r} is no option here: Megatron-Core has its own expert-parallel group, and "
                "spreads experts over it evenly"
            )


def pads(config: Any) -> bool:
    """Whether routers fill experts up with tokens that did not choose them, of probability 0."""
    names = ("moe_pad_expert_input_to_capacity", "moe_router_padding_for_quantization")
    return any(getattr(config, name, False) for name in names)


def choices(probs_TE: torch.Tensor, map_TE: torch.Tensor, top_k: int, *, padded: bool) -> Routing:
    """Ids and gates `[T, K]` of dense maps `[T, E]`; fewer choices are filled up with padding.

    padded: the map also has tokens that only fill an expert up to its capacity. They did not choose
    it, their probability is 0, and they add nothing: they are left out.
    """
    chosen = probs_TE.detach().masked_fill(~map_TE, -1)
    if padded:
        chosen = chosen.masked_fill(chosen == 0, -1)
    best, ids = chosen.topk(min(top_k, probs_TE.shape[1]), dim=1)
    gates = probs_TE.gather(1, ids)
    return Routing(ids.masked_fill(best < 0, PADDING), gates, None)
