"""Qwen3-MoE of transformers in FP8, unmodified or balanced: part of `bench_frameworks.py`.

Prefill: forward passes without gradients. On a GPU, the library's kernels multiply. It downloads
them; without a network, set FINEGRAINED_FP8 to the folder that contains the sources of the package
`finegrained_fp8`. Without a GPU, torch multiplies dequantised weights.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import transformers.integrations.finegrained_fp8 as fp8
import whole_transformers
from torch import nn
from transformers import FineGrainedFP8Config
from whole_models import Choices, Size, WholeModel

FOLDER = "FINEGRAINED_FP8"
BLOCK = {"cuda": 128, "cpu": 16}
NAME = "finegrained_fp8"


def _from_folder(folder: str) -> Any:
    """Import the sources of the kernels; a build would add the module `_ops`."""
    operators: Any = ModuleType(f"{NAME}._ops")
    operators.add_op_namespace_prefix = lambda name: f"{NAME}::{name}"
    operators.ops = getattr(torch.ops, NAME)
    sys.modules[operators.__name__] = operators
    sys.path.insert(0, str(Path(folder).resolve()))
    import finegrained_fp8  # type: ignore[import-not-found]

    return finegrained_fp8


def dequantised_product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    block_size: Any,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """Multiply rows by one dequantised weight."""
    plain = (
        weight.to(rows.dtype).unflatten(-1, (-1, block_size[1])).unflatten(-3, (-1, block_size[0]))
    )
    plain = (plain * scales[..., :, None, :, None].to(rows.dtype)).flatten(-4, -3).flatten(-2)
    product: torch.Tensor = rows @ plain.mT
    return product


def grouped_product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    *,
    offsets: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    block_size: Any,
) -> torch.Tensor:
    """Multiply rows sorted by expert."""
    del offsets
    parts = rows.split(tokens_per_expert.long().tolist())
    products = zip(parts, weight, scales, strict=True)
    return torch.cat([dequantised_product(*part, block_size) for part in products])


def load_kernels() -> None:
    """Provide the kernels; raise ImportError if this machine cannot load them."""
    if not torch.cuda.is_available():
        kernels: Any = SimpleNamespace(matmul=dequantised_product, grouped_matmul=grouped_product)
    elif FOLDER in os.environ:
        package = _from_folder(os.environ[FOLDER])
        kernels = fp8.FineGrainedFP8(
            matmul=package.matmul_2d,
            batched_matmul=package.matmul_batched,
            grouped_matmul=package.matmul_grouped,
        )
    else:
        fp8.load_finegrained_fp8_kernel()
        return
    fp8._FINEGRAINED_FP8 = kernels


load_kernels()


@torch.no_grad()
def quantise(model: nn.Module, block: int) -> None:
    """Replace experts and linear layers by the library's FP8 modules, with quantised weights."""
    config = FineGrainedFP8Config(
        weight_block_size=(block, block), modules_to_not_convert=["lm_head"]
    )
    full = dict(model.named_parameters())
    fp8.replace_with_fp8_linear(model, config.modules_to_not_convert, config)
    quantiser = fp8.Fp8Quantize(SimpleNamespace(quantization_config=config))
    for name, module in model.named_modules():
        if isinstance(module, (fp8.FP8Linear, fp8.FP8Experts)):
            for key in [key for key in module._parameters if f"{name}.{key}" in full]:
                path = f"{name}.{key}"
                for target, tensor in quantiser.convert({path: full.pop(path)}).items():
                    parameter = nn.Parameter(tensor, requires_grad=False)
                    setattr(module, target.rpartition(".")[2], parameter)


def build(
    size: Size, rank: int, device: torch.device, variant: str, choices: Choices
) -> WholeModel:
    """Qwen3-MoE in FP8. Unmodified, every rank holds all experts."""
    block = BLOCK[device.type]
    prepare = partial(quantise, block=block)
    model = whole_transformers.build(size, rank, device, variant, choices, prepare)
    loss = torch.no_grad()(model.loss)
    return WholeModel(loss, loss, model.imbalance)
