"""How the tensors of an engine's experts travel as replicas, for every quantisation method.

vLLM and SGLang prefix the tensors of an expert with `w13_` and `w2_`: weights, scales, zero points,
biases. They are parameters or plain attributes of the layer, and two names may share one tensor.
Replicas hold their raw bytes in the layout of the kernels, so nothing is dequantised or converted.

Shapes: H home experts of this rank, n experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

PREFIXES = ("w13_", "w2_")
OF_ROUTER = ("e_score_correction_bias", "hash_indices_table")  # not part of an expert


@dataclass(frozen=True, eq=False, slots=True)
class Carried:
    """A tensor of the layer and the form in which replicas hold it.

    tensor: the tensor of the layer.   names: its attributes.
    stack: contiguous `[H, ...]`; 8-bit and smaller floats are uint8, which all backends accept.
    order: the dimensions of `tensor` from the largest stride to the smallest.
    shared: whether all home experts use one value, for example a static scale of the activations.
        Replicas carry it, because other ranks have another value.
    """

    tensor: torch.Tensor
    names: tuple[str, ...]
    stack: torch.Tensor
    order: tuple[int, ...]
    shared: bool

    def restore(self, replicas: torch.Tensor) -> torch.Tensor:
        """Return `[n, ...]` replicas with dtype, dimensions and strides of the layer's tensor."""
        replicas = replicas.view(self.tensor.dtype)
        if self.shared:
            return replicas[0]
        return replicas.permute([self.order.index(dim) for dim in range(len(self.order))])


def carry_experts(layer: Any, homes: int) -> dict[str, Carried]:
    """Return every tensor of the layer's experts, by its first name."""
    names: dict[int, list[str]] = {}
    tensors = {name: t for name, t in _tensors(layer).items() if name.startswith(PREFIXES)}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {
        aliases[0]: _carry(tensors[aliases[0]], tuple(aliases), homes) for aliases in names.values()
    }


def tensors_without_bundle(layer: Any, homes: int) -> list[str]:
    """Return the tensors of the layer that replicas cannot carry, each with the reason."""
    reasons = []
    for name, tensor in _tensors(layer).items():
        if not name.startswith(PREFIXES):
            reasons.append(f"{name} is unknown")
        elif not _is_shared(tensor, homes):
            if len(tensor) != homes:
                reasons.append(f"{name} has shape {list(tensor.shape)} for {homes} experts")
            elif not (tensor.permute(_order(tensor)).is_contiguous() or 0 in tensor.stride()):
                reasons.append(f"{name} has gaps (strides {list(tensor.stride())})")
    return reasons


def _tensors(layer: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of the layer; buffers describe the placement of all experts."""
    parameters = dict(layer.named_parameters(recurse=False, remove_duplicate=False))
    attributes = {name: t for name, t in vars(layer).items() if isinstance(t, torch.Tensor)}
    return {name: t for name, t in (parameters | attributes).items() if name not in OF_ROUTER}


def _is_shared(tensor: torch.Tensor, homes: int) -> bool:
    return tensor.numel() == 1 and (not tensor.ndim or len(tensor) != homes)


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions from the largest stride to the smallest; experts stay first."""
    strides = tensor.stride()
    return (0, *sorted(range(1, tensor.ndim), key=lambda dim: -strides[dim]))


def _carry(tensor: torch.Tensor, names: tuple[str, ...], homes: int) -> Carried:
    values, shared = tensor.detach(), _is_shared(tensor, homes)
    order = _order(values)
    stack = values.expand(homes, *values.shape) if shared else values.permute(order)
    stack = stack.contiguous()  # copies only values that the experts share
    if stack.is_floating_point() and stack.dtype.itemsize == 1:
        stack = stack.view(torch.uint8)
    return Carried(tensor, names, stack, order, shared)
