"""Where the kernels run: on the GPU, or slowly through Triton's interpreter."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_interpreting = threading.RLock()


def interpreted() -> bool:
    """Whether `TRITON_INTERPRET=1` has the kernels run on the CPU, as tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def usable() -> bool:
    return interpreted() or torch.cuda.is_available()


@contextmanager
def launching(device: torch.device) -> Iterator[None]:
    """Kernels are launched on the current device; the interpreter is for one thread at a time."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        with _interpreting:
            yield


def default_device() -> torch.device:
    return torch.device("cpu" if interpreted() else "cuda")
