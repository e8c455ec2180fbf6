"""Hide ops that communicate from dispatch modes.

A mode may keep the result of an op and return it instead of calling the op again, as selective
activation checkpointing does. That is wrong for messages: all ranks take part in them, and what is
packed or allocated for one depends on earlier messages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from ultraep.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")
NOTHING = nullcontext()


def seen_by_modes() -> bool:
    """Return whether a dispatch mode sees the ops that run now."""
    return torch._C._len_torch_dispatch_stack() > 0


@overload
def outside_dispatch_modes() -> AbstractContextManager[None]: ...


@overload
def outside_dispatch_modes(function: Callable[P, T], /) -> Callable[P, T]: ...


def outside_dispatch_modes(function: Callable[P, T] | None = None, /) -> Any:
    """Hide the ops of a function, or of a `with` block, from dispatch modes."""
    if function is None:
        return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else NOTHING

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch._C._len_torch_dispatch_stack():
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def refuse_transforms() -> None:
    """Raise inside torch.func transforms and forward-mode levels, which cannot see messages."""
    if _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise ConfigError(
            "a balanced layer cannot run inside a torch.func transform (grad, vjp, jvp, vmap) or "
            "forward_ad.dual_level(): other ranks take part in it; use loss.backward() or "
            "torch.autograd.grad"
        )
