"""Ranks that share one GPU: their processes, a balancer for each data plane, and passes."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import Example, assert_close, gradients_of
from mps import ThroughHost, rank_environment
from ranks import RankPool

from ultraep import Balancer
from ultraep.runtime.connect import connect

CUDA = torch.device("cuda")
PATIENCE = 120.0  # seconds; enough to compile kernels
PRECISION = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
Tensors = dict[str, torch.Tensor]


@contextmanager
def processes(size: int, directories: dict[str, str]) -> Iterator[RankPool]:
    """Processes that share the GPU; directories: of CUDA MPS, empty: they take turns."""
    with pytest.MonkeyPatch.context() as patch:
        environment = directories | rank_environment(size)
        if not directories:
            del environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
        for name, value in environment.items():
            patch.setenv(name, value)
        with RankPool(size) as pool:
            yield pool


def mapped(group: dist.ProcessGroup, **options: Any) -> Balancer:
    warnings.simplefilter("default")  # torch's symmetric memory warns
    return Balancer._with_settings(group, data_plane="mapped", timeout=PATIENCE, **options)


def messages(group: dist.ProcessGroup, **options: Any) -> Balancer:
    communicator = ThroughHost(connect(group, timeout=PATIENCE))
    return Balancer._with_settings(communicator, data_plane="messages", **options)


def hybrid(group: dist.ProcessGroup, **options: Any) -> Balancer:
    warnings.simplefilter("default")  # torch's symmetric memory warns
    communicator = ThroughHost(connect(group, timeout=PATIENCE))
    return Balancer._with_settings(communicator, data_plane="hybrid", timeout=PATIENCE, **options)


def one_pass(
    run: Any,
    example: Example,
    rank: int = 0,
    *,
    owner: Any = None,
    cast: bool = False,
    **options: Any,
) -> Tensors:
    """Output and all gradients of one pass through `run`, on the host.

    owner: the layer that has the weights, if it is not `run`.   cast: forward under autocast.
    """
    owner = owner or run
    owner.zero_grad()
    x = example.inputs[rank].to(CUDA, copy=True).requires_grad_()
    with torch.autocast(CUDA.type, dtype=torch.bfloat16, enabled=cast):
        y = run(x, **options)
    y.backward(example.gradients[rank].to(y))
    owner.balancer.check()
    actual = {"y": y.detach(), **gradients_of(owner, x)}
    return {name: tensor.cpu() for name, tensor in actual.items()}


def assert_alike(actual: Tensors, expected: Tensors, tolerance: float | None = None) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        allowed = PRECISION[tensor.dtype] if tolerance is None else tolerance
        assert_close(actual[name], tensor, name, allowed)
