"""Ops that dispatch modes shall not see: what ranks tell and send each other.

A mode may keep what an op returns and hand it out instead of calling the op again, as selective
activation checkpointing does. A message is no such op: all ranks take part in it, and what is
packed or allocated for it depends on what was sent before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import _functorch
from torch.utils._python_dispatch import _disable_current_modes

from ultraep.errors import ConfigError


def seen_by_modes() -> bool:
    """Whether a dispatch mode sees the ops that run now."""
    return torch._C._len_torch_dispatch_stack() > 0


@contextmanager
def unseen() -> Iterator[None]:
    """No dispatch mode sees the ops of this block, or of the decorated function."""
    if not seen_by_modes():
        yield
        return
    with _disable_current_modes():
        yield


def refuse_transforms() -> None:
    """Raise inside of torch.func.grad, vmap and their like, which cannot see into messages."""
    if _functorch.peek_interpreter_stack() is not None:
        raise ConfigError(
            "a balanced layer cannot run inside of a torch.func transform (grad, vjp, jvp, vmap): "
            "other ranks take part in it; use loss.backward() or torch.autograd.grad"
        )
