"""Run Megatron-Core without a GPU: replaces the CUDA functions that it calls.

    with on_cpu(): ...          # around all uses of Megatron-Core

For examples, tests and benchmarks. It does not change results and is not needed on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode


class CudaIsCpu(TorchFunctionMode):
    """Creates "cuda" tensors on the CPU and reports CUDA tensor types."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):  # optimizers check it
            return result.replace("torch.", "torch.cuda.", 1)
        return result


class Stream:
    """A stream that runs everything immediately."""

    def wait_stream(self, other: Stream) -> None: ...

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None: ...


def counts_on_host(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Return row counts in the form they have after a copy from a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


@contextmanager
def on_cpu() -> Iterator[None]:
    """Replace the CUDA functions of torch and Megatron-Core."""
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    replacements: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: "cpu"),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "current_stream", Stream),
        (torch.cuda, "stream", nullcontext),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, **__: torch.set_rng_state(state)),
        (token_dispatcher, "maybe_move_tensor_to_cpu", counts_on_host),
        # of Transformer Engine, which this release uses without checking that it is installed
        (moe_utils, "te_general_gemm", None),
    ]
    with ExitStack() as undo:
        for module, name, replacement in replacements:
            undo.enter_context(patch.object(module, name, replacement, create=True))
        undo.enter_context(CudaIsCpu())
        yield
