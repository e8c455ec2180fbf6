"""The tensors of an expert, packed into one row of bytes: the content of a spare slot.

A bundle maps names to the tensors of the home experts of a rank (weights, biases, quantised data
and scales). Each entry is one tensor stacked over experts, a list with one tensor per expert, or a
function that returns either. Functions are called at every use, because frameworks that shard
weights move them between calls; all calls of a microbatch must return equal values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import torch

from ultraep.errors import ConfigError

Stack: TypeAlias = torch.Tensor | Sequence[torch.Tensor]  # [H, ...], or H tensors
Bundle: TypeAlias = Mapping[str, Stack | Callable[[], Stack]]
ALIGNMENT = 64


def resolve(bundle: Bundle) -> dict[str, Stack]:
    """Return the current tensors of a bundle, calling its functions."""
    resolved: dict[str, Any] = dict(bundle)
    for name, stack in bundle.items():
        if callable(stack):
            resolved[name] = stack()
    return resolved


def tensors_of(stack: Stack) -> list[torch.Tensor]:
    """Return the tensors of a stack: one, or one for every expert."""
    return [stack] if isinstance(stack, torch.Tensor) else list(stack)


def flat_tensors(stacks: Mapping[str, Stack]) -> list[torch.Tensor]:
    return [tensor for stack in stacks.values() for tensor in tensors_of(stack)]


def stacked_like(stacks: Mapping[str, Stack], flat: Iterator[Any]) -> dict[str, Any]:
    """Return the next values by name, in the form of these stacks; reverses `flat_tensors`."""
    return {
        name: next(flat) if isinstance(stack, torch.Tensor) else [next(flat) for _ in stack]
        for name, stack in stacks.items()
    }


def stored_tensors(bundle: Bundle) -> list[torch.Tensor]:
    """Return the tensors that the bundle holds itself, not those its functions return."""
    return flat_tensors({name: stack for name, stack in bundle.items() if not callable(stack)})


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of one-byte elements as uint8; torch cannot copy or compare all formats.

    Wider elements stay as they are.
    """
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def check_trainable(tensors: Mapping[str, Stack]) -> None:
    """Refuse quantised tensors that require gradients: a gradient in their dtype is useless."""
    for name, stack in tensors.items():
        for tensor in tensors_of(stack):
            if tensor.requires_grad and tensor.dtype.itemsize < 2:
                raise ConfigError(
                    f"{name!r} is {tensor.dtype} and requires gradients, but quantised tensors "
                    "cannot be trained: call requires_grad_(False) on it"
                )


def check_repeatable(bundle: Bundle) -> None:
    """Refuse functions that return different values in two calls: replicas would differ."""
    for name, function in bundle.items():
        if callable(function):
            pairs = zip(tensors_of(function()), tensors_of(function()), strict=True)
            if not all(torch.equal(as_bytes(first), as_bytes(second)) for first, second in pairs):
                raise ConfigError(
                    f"the function for {name!r} returned different values in two calls; apply "
                    "weight dropout and other random state in the network, or once per step"
                )


def device_of_bundle(tensors: Mapping[str, Stack]) -> torch.device:
    stack = next(iter(tensors.values()))
    return (stack if isinstance(stack, torch.Tensor) else stack[0]).device


@dataclass(frozen=True)
class Layout:
    """The position of each tensor of one expert in a row of bytes."""

    parts: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]  # name, shape, dtype

    @classmethod
    def of(cls, tensors: Mapping[str, Stack], homes: int) -> Layout:
        """Return the layout of tensors of `homes` experts."""
        if not tensors:
            raise ConfigError("a bundle needs at least one tensor")
        parts = [(name, *_shape_and_dtype(name, s, homes)) for name, s in tensors.items()]
        return _layout(tuple(parts))

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        """First byte and end of every tensor in the row."""
        spans, begin = {}, 0
        for name, shape, dtype in self.parts:
            end = begin + torch.Size(shape).numel() * dtype.itemsize
            spans[name] = (begin, end)
            begin = -(-end // ALIGNMENT) * ALIGNMENT
        return spans

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return max(-(-end // ALIGNMENT) * ALIGNMENT for _, end in self.spans.values())

    def views(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return every tensor of the bundle, `[rows, ...]`, as a view of rows of bytes."""
        views = {}
        for name, shape, dtype in self.parts:
            begin, end = self.spans[name]
            views[name] = rows[:, begin:end].view(dtype).unflatten(1, shape or (1,))
            if not shape:
                views[name] = views[name].squeeze(1)
        return views

    def pack(self, tensors: Mapping[str, Stack], index: int) -> torch.Tensor:
        """Return the row of bytes of one home expert."""
        device = device_of_bundle(tensors)
        row = torch.zeros(1, self.nbytes, dtype=torch.uint8, device=device)
        for name, view in self.views(row).items():
            as_bytes(view[0]).copy_(as_bytes(tensors[name][index].detach()))
        return row[0]


@lru_cache(maxsize=256)
def _layout(parts: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]) -> Layout:
    """Return one object for all layouts that are equal, with its spans."""
    return Layout(parts)


def _shape_and_dtype(name: str, stack: Stack, homes: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of one expert's tensor."""
    if isinstance(stack, torch.Tensor):
        if not stack.ndim or len(stack) != homes:
            raise ConfigError(
                f"{name!r} must be stacked over {homes} home experts, got shape {list(stack.shape)}"
            )
        return tuple(stack.shape[1:]), stack.dtype
    if len(stack) != homes or not homes:
        raise ConfigError(
            f"{name!r} must be {homes} tensors, one for each home expert, got {len(stack)}"
            + "; without home experts, pass an empty tensor [0, ...]" * (not homes)
        )
    parts = {(tuple(tensor.shape), tensor.dtype) for tensor in stack}
    if len(parts) > 1:
        raise ConfigError(
            f"{name!r} must have one shape and dtype for all home experts, "
            f"got {sorted(map(str, parts))}"
        )
    return parts.pop()


def signature(tensors: Mapping[str, Stack], **others: torch.Tensor | None) -> str:
    """Return names, shapes, dtypes and requires_grad of tensors, which all ranks must share."""
    described = [
        (name, stack.shape[1:], stack.dtype, stack.requires_grad)
        if isinstance(stack, torch.Tensor)
        else (name, *_shape_and_dtype(name, stack, len(stack)), any(t.requires_grad for t in stack))
        for name, stack in (*tensors.items(), *others.items())
        if stack is not None
    ]
    return _describe(tuple(described), torch.is_grad_enabled())


@lru_cache(maxsize=1024)
def _describe(
    described: tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...], grad_enabled: bool
) -> str:
    return ", ".join(
        f"{name} {list(shape)} {dtype}{' with gradient' * (grad_enabled and requires_grad)}"
        for name, shape, dtype, requires_grad in described
    )
