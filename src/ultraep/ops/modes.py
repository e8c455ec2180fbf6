"""Hide ops that communicate from dispatch modes.

A mode may keep the result of an op and return it instead of calling the op again, as selective
activation checkpointing does. That is wrong for messages: all ranks take part in them, and what is
packed or allocated for one depends on earlier messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._C import _functorch
from torch.utils._python_dispatch import _disable_current_modes

from ultraep.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


def seen_by_modes() -> bool:
    """Return whether a dispatch mode sees the ops that run now."""
    return torch._C._len_torch_dispatch_stack() > 0


@contextmanager
def unseen() -> Iterator[None]:
    """Hide the ops of this block from dispatch modes."""
    if not seen_by_modes():
        yield
        return
    with _disable_current_modes():
        yield


def hidden(function: Callable[P, T]) -> Callable[P, T]:
    """Hide the ops of a function from dispatch modes. Without a mode, the call is direct."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not seen_by_modes():
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def refuse_transforms() -> None:
    """Raise inside torch.func.grad, vmap and similar transforms, which cannot see messages."""
    if _functorch.peek_interpreter_stack() is not None:
        raise ConfigError(
            "a balanced layer cannot run inside a torch.func transform (grad, vjp, jvp, vmap): "
            "other ranks take part in it; use loss.backward() or torch.autograd.grad"
        )
