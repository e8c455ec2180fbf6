"""A stand-in for SGLang's compiled kernels on CPUs: only what SGLang 0.5.23 imports or calls there.

Other names can be imported and raise when they are called. Without `convert_weight_packed`, SGLang
takes its own torch paths.
"""

from __future__ import annotations

from typing import Any

import torch

__version__ = "0.4.10"
_library = torch.library.Library("sgl_kernel", "FRAGMENT")


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start: Any, end: Any, out_cache_loc: Any, _: int
) -> None:
    """Write where the tokens of each request lie in the cache."""
    begin = 0
    for request, first, last in zip(
        req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True
    ):
        req_to_token[request, first:last] = out_cache_loc[begin : begin + last - first]
        begin += last - first


def all_reduce(data: torch.Tensor, op: int) -> None:
    """Sum over all ranks, as SGLang does through shared memory."""
    torch.distributed.all_reduce(data)


def all_gather(data: torch.Tensor, dim: int) -> torch.Tensor:
    """Concatenate the tensors of all ranks."""
    parts = [torch.empty_like(data) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, data.contiguous())
    return torch.cat(parts, dim=dim)


for schema, function, key in (
    ("init_cpu_threads_env(str? cpu_ids) -> ()", lambda _: None, "CompositeExplicitAutograd"),
    ("initialize(int size, int rank) -> ()", lambda *_: None, "CompositeExplicitAutograd"),
    ("shm_allreduce(Tensor(a!) data, int reduce_op) -> ()", all_reduce, "CPU"),
    ("shm_allgather(Tensor data, int dim) -> Tensor", all_gather, "CPU"),
):
    _library.define(schema)
    _library.impl(schema.split("(", 1)[0], function, key)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"stand-in for sgl_kernel: {name}")

    missing.__name__ = name
    return missing
