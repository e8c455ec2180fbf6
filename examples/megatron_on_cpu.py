"""Megatron-Core 0.16 on ranks without a GPU: what it asks of CUDA, answered by the CPU.

    with on_cpu(): ...          # around everything that Megatron-Core does

For examples, tests and benchmarks of its balanced layers. On GPUs nothing of this is needed, and
nothing of this changes what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode


class CudaIsCpu(TorchFunctionMode):
    """Tensors that are asked for on "cuda" are on the CPU, and say that they are of CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        answer = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(answer, str):  # what optimizers look at
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer


class Stream:
    """A stream, where everything is done at once."""

    def wait_stream(self, other: Stream) -> None: ...

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None: ...


def counts_on_host(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Numbers of rows as the library has them after they were copied from a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let Megatron-Core find a CPU where it looks for a GPU."""
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    answers: list[tuple[Any, str, Any]] = [
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
        # of Transformer Engine: the release names it without asking whether it is there
        (moe_utils, "te_general_gemm", None),
    ]
    with ExitStack() as undo:
        for where, name, answer in answers:
            undo.enter_context(patch.object(where, name, answer, create=True))
        undo.enter_context(CudaIsCpu())
        yield
