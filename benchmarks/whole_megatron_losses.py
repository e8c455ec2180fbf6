"""Optimizer steps of GPT of Megatron-Core: part of `bench_frameworks.py --losses`.

The model has the library's DDP, distributed optimizer and selective recompute. Two microbatches are
in flight. The kernels of Transformer Engine add gradients to `main_grad`.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import whole_megatron
from layers import slowest
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    param_and_grad_buffer,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import layers
from whole_models import Choices, Size, text_batch

from ultraep.integrations.megatron import balancers

MICROBATCHES = 2
HOT = 3.0  # factor of the router's weights of four experts of the first rank
INTEGER = {2: torch.int16, 4: torch.int32}  # as wide as a weight


def through_host(
    collective: Any, output: Any, given: Any, *, async_op: bool, **options: Any
) -> None:
    """Gloo cannot gather and scatter tensors of a GPU."""
    assert not async_op
    on_host = torch.empty_like(output, device="cpu")
    collective(on_host, given.cpu(), **options)
    output.copy_(on_host)


def add_product(rows: torch.Tensor, gradients: torch.Tensor, total: torch.Tensor) -> None:
    """Add to `main_grad` of the output layer, which otherwise needs an extension of Apex."""
    total.add_(gradients.T @ rows)


def replace_in_library() -> None:
    """Replace what needs NCCL or Apex."""
    buffers = param_and_grad_buffer
    buffers._coalescing_manager = lambda *_, **__: nullcontext()
    buffers.dist_all_gather_func = partial(through_host, dist.all_gather_into_tensor)
    buffers.dist_reduce_scatter_func = partial(through_host, dist.reduce_scatter_tensor)
    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_product)


def train(
    size: Size,
    rank: int,
    device: torch.device,
    variant: str,
    options: dict[str, Any],
    *,
    flipped: bool,
) -> dict[str, Any]:
    """Losses and seconds of every step, and replicas of a step.

    options: of the library's configuration.   flipped: one weight in 1000 has another last bit.
    """
    replace_in_library()
    os.environ["ULTRAEP_RATES"] = "off"  # make replicas, whether or not they pay
    inner = whole_megatron.model_of(size, device, variant, Choices(), options)
    for name, weight in inner.named_parameters():
        if name.endswith("router.weight"):
            weight.data[:4] *= HOT
        if flipped:
            weight.data.view(-1).view(INTEGER[weight.element_size()])[::1000] ^= 1
    distributed = {"use_distributed_optimizer": True}
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **distributed)
    model, dtype = DistributedDataParallel(inner.config, ddp, inner), inner.config.params_dtype
    bf16 = dtype is torch.bfloat16
    adam = OptimizerConfig(lr=1e-3, bf16=bf16, params_dtype=dtype, **distributed)
    optimizer = get_megatron_optimizer(adam, [model])
    for balancer in balancers(model):  # models share it
        balancer.reset_stats()
    means: list[float] = []

    def step() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model.set_is_first_microbatch()  # weights have changed
        batches = [
            text_batch(size, rank, device, MICROBATCHES * len(means) + index)
            for index in range(MICROBATCHES)
        ]
        losses = [whole_megatron.loss_of(model, batch) for batch in batches]
        for loss in losses:
            (loss / MICROBATCHES).backward()
        finalize_model_grads([model])
        optimizer.step()
        mean = torch.stack(losses).detach().float().mean().cpu()
        dist.all_reduce(mean)
        means.append(float(mean) / size.ranks)

    seconds = [slowest(step, 1, device)[0] for _ in range(size.steps)]
    replicas = sum(balancer.stats()["copies"] for balancer in balancers(model)) / size.steps
    return {"losses": means, "seconds": seconds, "replicas": replicas}
