"""Ops that dispatch modes shall not see: what ranks tell and send each other.

A mode may keep what an op returns and hand it out instead of calling the op again, as selective
activation checkpointing does. A message is no such op: all ranks take part in it, and what is
packed or allocated for it depends on what was sent before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def unseen() -> Iterator[None]:
    """No dispatch mode sees the ops of this block, or of the decorated function."""
    if not torch._C._len_torch_dispatch_stack():
        yield
        return
    with _disable_current_modes():
        yield
