"""Where the kernels run: on the GPU, or slowly in Triton's interpreter."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_interpreting = threading.RLock()


def interpreted() -> bool:
    """Return whether `TRITON_INTERPRET=1` runs the kernels on the CPU, as tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def usable() -> bool:
    return interpreted() or torch.cuda.is_available()


def launching(device: torch.device) -> AbstractContextManager[Any]:
    """Make the device current for launches; the interpreter serves one thread at a time."""
    if device.type != "cuda":
        return _interpreting
    if device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def default_device() -> torch.device:
    return torch.device("cpu" if interpreted() else "cuda")
