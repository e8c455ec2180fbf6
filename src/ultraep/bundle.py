"""The tensors of an expert as one row of bytes: what a spare slot holds and what travels.

A bundle is any number of tensors per expert (weights, biases, quantised data with their scales).
Each is given for the home experts of a rank: stacked in one tensor, or as a list of one tensor per
expert, or as a function that returns either. Functions are called at every use: frameworks that
shard their weights move them between calls. All calls of a microbatch must return equal values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import torch

from ultraep.errors import ConfigError

Stack: TypeAlias = torch.Tensor | Sequence[torch.Tensor]  # [H, ...], or H tensors
Bundle: TypeAlias = Mapping[str, Stack | Callable[[], Stack]]
ALIGNMENT = 64


def resolve(bundle: Bundle) -> dict[str, Stack]:
    """The tensors of a bundle, as they are now."""
    return {name: given() if callable(given) else given for name, given in bundle.items()}


def tensors_of(stack: Stack) -> list[torch.Tensor]:
    """The tensors that a stack consists of: one, or one for every expert."""
    return [stack] if isinstance(stack, torch.Tensor) else list(stack)


def stored_tensors(bundle: Bundle) -> list[torch.Tensor]:
    """Those tensors of a bundle that are given as such: what functions return may be new."""
    given = [stack for stack in bundle.values() if not callable(stack)]
    return [tensor for stack in given for tensor in tensors_of(stack)]


def check_repeatable(bundle: Bundle) -> None:
    """Refuse functions whose values differ between two calls: replicas would differ from homes."""
    for name, function in bundle.items():
        if callable(function):
            pairs = zip(tensors_of(function()), tensors_of(function()), strict=True)
            if not all(torch.equal(first, second) for first, second in pairs):
                raise ConfigError(
                    f"the function for {name!r} returned different values in two calls; weight "
                    "dropout and other state must be applied by the network, or once per step"
                )


def device_of_bundle(tensors: Mapping[str, Stack]) -> torch.device:
    """Where the tensors are."""
    return next(t.device for stack in tensors.values() for t in tensors_of(stack))


@dataclass(frozen=True, eq=False, slots=True)
class TensorVersion:
    """A tensor as it was. It is not mistaken for a new tensor in the same memory."""

    tensor: weakref.ref[torch.Tensor]
    address: int
    writes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorVersion:
        writes = 0 if tensor.is_inference() else tensor._version
        return cls(weakref.ref(tensor), tensor.data_ptr(), writes)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TensorVersion)
            and self.tensor() is other.tensor()
            and (self.address, self.writes) == (other.address, other.writes)
        )


Weights: TypeAlias = list[TensorVersion | Callable[[], Stack]]


def bundle_versions(bundle: Bundle) -> Weights:
    """Return what identifies the weights of a bundle: tensors as they are, functions themselves.

    A function may return new tensors at every call, so only the promise covers what it returns.
    """
    found: Weights = []
    for stack in bundle.values():
        found += (
            [stack]
            if callable(stack)
            else [TensorVersion.of(tensor) for tensor in tensors_of(stack)]
        )
    return found


@dataclass(frozen=True)
class Layout:
    """Where each tensor of one expert stands in a row of bytes."""

    parts: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]  # name, shape, type

    @classmethod
    def of(cls, tensors: Mapping[str, Stack], homes: int) -> Layout:
        """The layout of tensors that are each given for `homes` experts."""
        if not tensors:
            raise ConfigError("a bundle needs at least one tensor")
        return cls(tuple((name, *_kind(name, stack, homes)) for name, stack in tensors.items()))

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        """Begin and end of every tensor in the row."""
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
        """Every tensor of the bundle `[rows, ...]` as a view of rows of bytes."""
        views = {}
        for name, shape, dtype in self.parts:
            begin, end = self.spans[name]
            views[name] = rows[:, begin:end].view(dtype).unflatten(1, shape or (1,))
            if not shape:
                views[name] = views[name].squeeze(1)
        return views

    def pack(self, tensors: Mapping[str, Stack], index: int) -> torch.Tensor:
        """The row of bytes of one home expert."""
        device = device_of_bundle(tensors)
        row = torch.zeros(1, self.nbytes, dtype=torch.uint8, device=device)
        for name, view in self.views(row).items():
            view[0].copy_(tensors[name][index].detach())
        return row[0]


def _kind(name: str, stack: Stack, homes: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type of one expert's tensor."""
    if isinstance(stack, torch.Tensor):
        if not stack.ndim or len(stack) != homes:
            raise ConfigError(
                f"{name!r} must be stacked over {homes} home experts, got shape {list(stack.shape)}"
            )
        return tuple(stack.shape[1:]), stack.dtype
    if len(stack) != homes or not homes:
        raise ConfigError(
            f"{name!r} must be {homes} tensors, one for each home expert, got {len(stack)}"
            + " and no shape: give a tensor [0, ...]" * (not homes)
        )
    kinds = {(tuple(tensor.shape), tensor.dtype) for tensor in stack}
    if len(kinds) > 1:
        raise ConfigError(
            f"{name!r} must be alike for all home experts, got {sorted(map(str, kinds))}"
        )
    return kinds.pop()


def signature(tensors: Mapping[str, Stack], **others: torch.Tensor | None) -> str:
    """What ranks must have alike: names, shapes and types of tensors, and who wants gradients."""
    named = [
        (name, *_kind(name, stack, len(stack)), any(t.requires_grad for t in tensors_of(stack)))
        for name, stack in tensors.items()
    ]
    named += [
        (name, tuple(tensor.shape[1:]), tensor.dtype, tensor.requires_grad)
        for name, tensor in others.items()
        if tensor is not None
    ]
    return _told(tuple(named), torch.is_grad_enabled())


@lru_cache(maxsize=1024)
def _told(named: tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...], learning: bool) -> str:
    return ", ".join(
        f"{name} {list(shape)} {dtype}{' with gradient' * (learning and wants)}"
        for name, shape, dtype, wants in named
    )
