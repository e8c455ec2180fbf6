"""Megatron-Core 0.16 on ranks without a GPU: what it asks of CUDA, answered by the CPU.

    with on_cpu(): ...          # around everything that Megatron-Core does

For examples, tests and benchmarks of its balanced layers. On GPUs nothing of this is needed, and
nothing of this changes what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode


class CudaIsCpu(TorchFunctionMode):
    """Tensors that are asked for on "cuda" are on the CPU, and say that they are of CUDA."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        answer = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(answer, str):  # what optimizers look at
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let Megatron-Core find a CPU where it looks for a GPU."""
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils

    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: "cpu"),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, **__: torch.set_rng_state(state)),
        # of Transformer Engine: the release names it without asking whether it is there
        (moe_utils, "te_general_gemm", None),
    ]
    with ExitStack() as undo:
        for where, name, answer in answers:
            undo.enter_context(patch.object(where, name, answer, create=True))
        undo.enter_context(CudaIsCpu())
        yield
