"""Autograd functions that need more than tensors in backward, under activation checkpointing.

Checkpointing drops the tensors that the first forward pass saved, and gives backward the tensors of
a second forward pass. Anything else stored on `ctx` still belongs to the first pass: other routes,
another loan, other buffers. So these functions save their state as a tensor as well: a label, which
checkpointing replaces together with the other tensors.

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, state, x):
            save(ctx, state, x)
            ...

        @staticmethod
        @first_order
        def backward(ctx, state, gradients, saved): ...
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import count
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from ultraep.errors import SlotError
from ultraep.ops.modes import outside_dispatch_modes
from ultraep.passes import NOTING_FAILURES

Gradients: TypeAlias = tuple[torch.Tensor | None, ...]

_numbers = count()
_states: WeakValueDictionary[int, Any] = WeakValueDictionary()


class _Label(np.ndarray[Any, Any]):
    """The memory of a label. It keeps the state alive for as long as a tensor uses the memory."""

    state: Any


def label_of(state: Any) -> torch.Tensor:
    """Return an integer tensor that identifies the state and keeps it alive."""
    number = next(_numbers)
    memory = np.array([number]).view(_Label)
    memory.state = _states[number] = state
    with outside_dispatch_modes():
        return torch.from_numpy(memory)


class _Untracked:
    """The context of a forward pass that has no backward pass."""

    needs_input_grad = (False,) * 16

    def __setattr__(self, name: str, value: object) -> None: ...

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


UNTRACKED = _Untracked()


def run(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call an autograd function; if gradients are disabled, only its forward pass, which is faster.

    Saved tensors and attributes of `ctx` are then dropped.
    """
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(UNTRACKED, *arguments)


def save(ctx: Any, state: Any, *tensors: torch.Tensor) -> None:
    """Save tensors for backward, and the state that belongs to them."""
    if ctx is UNTRACKED:
        return
    ctx.state = state  # a hook that copies saved tensors would otherwise lose the state
    ctx.save_for_backward(label_of(state), *tensors)


def state_of(label: torch.Tensor) -> Any:
    state = _states.get(int(label))
    if state is None:
        raise SlotError(
            "the state of this microbatch is gone: a saved-tensor hook copied a tensor of a "
            "recomputed forward pass; exclude int64 tensors on the CPU from that hook"
        )
    return state


def first_order(
    backward: Callable[[Any, Any, Gradients, tuple[torch.Tensor, ...]], Gradients],
) -> Callable[..., Gradients]:
    """Turn `backward(ctx, state, gradients, saved)` into the backward of an autograd function.

    A second derivative raises a RuntimeError. `once_differentiable` alone would miss it where the
    incoming gradients are constants and only the saved tensors require gradients.
    """

    @once_differentiable
    def once(ctx: Any, state: Any, num_gradients: int, *tensors: Any) -> Gradients:
        return backward(ctx, state, tensors[:num_gradients], tensors[num_gradients:])

    @wraps(backward)
    def checked(ctx: Any, *gradients: torch.Tensor | None) -> Gradients:
        label, *saved = ctx.saved_tensors
        with NOTING_FAILURES:
            result: Gradients = once(ctx, state_of(label), len(gradients), *gradients, *saved)
        return result

    return checked
