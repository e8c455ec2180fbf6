"""Run torchtitan on CPU ranks: replaces what its release takes from CUDA and NCCL.

For the example, the tests and the benchmark; not needed on GPUs. Call `use_cpu()` before importing
torchtitan. It replaces:

    device         the framework assumes "cuda" if it finds no accelerator
    memory         its metrics query the name and the memory of the device
    casts          experts multiply in bfloat16, which few CPUs support
    attention      flex attention has no backward on CPUs, and is not compiled on its own
    init           on CPUs, all shards of a parameter get the same random values

and with `use_gloo()`, which several ranks on one GPU need as well:

    sums           gloo has no reduction with a factor; FSDP2 can divide afterwards
    all-to-all     gloo supports lists of equal sizes only
    timeouts       torch before 2.14 cannot change them after the first step
    barrier        gloo does not accept device ids
"""

from __future__ import annotations

import resource
import warnings
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.attention.flex_attention import AuxOutput, BlockMask

NEW = hasattr(dist, "set_timeout")  # torch 2.14 or later, which the framework targets
IGNORED_WARNINGS = (
    r"DTensor .* may not have complete support on cpu",
    "In CPU autocast, but the target",
)
MEMORY = SimpleNamespace(total_memory=1 << 34, name="CPU")  # of a rank, for percentages


def use_cpu() -> None:
    """Let torchtitan run on CPU ranks."""
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message, UserWarning)
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.Tensor.bfloat16 = lambda tensor: tensor
    for name, host in HOST.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, host)
    from torchtitan.distributed import compile as compiling
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.protocols.module import Module

    FlexAttention._compiled_flex_attn = staticmethod(attention)
    compiling._maybe_regional_inductor_backend = lambda _, backend: backend
    Module._init_param = draw_whole
    use_gloo()


def use_gloo() -> None:
    """Let torchtitan send its messages with gloo."""
    factors = _fsdp_collectives._get_gradient_divide_factors
    _fsdp_collectives._get_gradient_divide_factors = lambda *args: factors(*args[:-1], True)
    dist.barrier = without_devices(dist.barrier)
    dist.all_to_all = all_to_all
    if not NEW:
        dist.set_timeout = lambda *_: None


def without_devices(barrier: Callable[..., Any]) -> Callable[..., Any]:
    """Return a barrier that ignores device ids."""

    @wraps(barrier)
    def on_hosts(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        del device_ids
        return barrier(group, async_op)

    return on_hosts


def all_to_all(outputs: list[Any], inputs: list[Any], group: Any = None) -> None:
    """Exchange pieces of any size, as one tensor."""
    sizes, sent = ([len(piece) for piece in pieces] for pieces in (outputs, inputs))
    received = inputs[0].new_empty((sum(sizes), *inputs[0].shape[1:]))
    dist.all_to_all_single(received, torch.cat(inputs), sizes, sent, group)
    for output, piece in zip(outputs, received.split(sizes), strict=True):
        output.copy_(piece)


def draw_whole(module: Any, name: str, parameter: torch.Tensor) -> None:
    """Initialise a parameter with the same values on any number of ranks."""
    whole = torch.empty(parameter.shape, dtype=parameter.dtype)
    module._param_init[name](whole)
    if isinstance(parameter, DTensor):
        shape, begin = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        whole = whole[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))]
        parameter = parameter.to_local()
    parameter.copy_(whole)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_mask: BlockMask,
    scale: float | None,
    enable_gqa: bool,
    **_: Any,
) -> tuple[torch.Tensor, AuxOutput]:
    """Compute flex attention with plain products: `[B, N, L, H]` and `[B, N, L]` log sums."""
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = (q @ k.mT).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    b, h = (torch.arange(n)[(..., *[None] * d)] for n, d in zip(q.shape[:2], (3, 2), strict=True))
    at, to = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    scores = scores.masked_fill(~block_mask.mask_mod(b, h, at, to), float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v, AuxOutput(lse=scores.logsumexp(-1))


def peak_memory(_: Any = None) -> dict[str, int]:
    """Return the peak memory of this process as device memory stats."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {f"{kind}_bytes.all.peak": peak for kind in ("active", "reserved")}


HOST: dict[str, Callable[..., Any]] = {
    "empty_cache": lambda: None,
    "get_device_name": lambda _: MEMORY.name,
    "get_device_properties": lambda _: MEMORY,
    "memory_stats": peak_memory,
    "reset_peak_memory_stats": lambda: None,
}
