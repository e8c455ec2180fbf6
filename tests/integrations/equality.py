"""Compare a balanced model with the unmodified model, on every rank."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
import warm
from families import batch, build, loss, outputs
from permuting import Differentiable
from shared_peers import SharedPeers

from ultraep.integrations.transformers import balance
from ultraep.integrations.transformers.experts import expert_owners
from ultraep.runtime.balancer import Balancer
from ultraep.runtime.connect import connect

warm.preload("transformers.trainer", "ultraep.integrations.transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings of the library and of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def under_torchrun(rank: int, size: int) -> Iterator[None]:
    """Set the environment variables of torchrun; the process group stays."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in variables.items()})
    forget_accelerate()
    try:
        with quiet(), redirect_stdout(None):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        forget_accelerate()


def forget_accelerate() -> None:
    """Reset the ranks that accelerate stores in a process; every test has its own group."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def learn(model: Any, batches: list[torch.Tensor], scale: float = 1.0) -> list[torch.Tensor]:
    """Return the outputs for these batches; accumulate their gradients in the model."""
    values = [outputs(model, ids) for ids in batches]
    for value in values:
        (scale * loss(value)).backward()
    return [value.detach() for value in values]


def all_batches(group: Any) -> list[torch.Tensor]:
    return [batch(rank) for rank in range(group.size())]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, limit: float = 1e-5) -> None:
    """Assert equality up to a limit, relative to the largest value."""
    error, scale = (actual - expected).abs().max().item(), expected.abs().max().item()
    assert error <= limit * scale, f"off by {error:.3g}, largest value {scale:.3g}"


def assert_same_gradients(balanced: Any, plain: Any, limit: float = 1e-5) -> None:
    """Assert that the gradients of a balanced model equal the plain model's, summed over ranks.

    Errors are relative to the largest gradient of a module (terms of the bias of keys cancel), or
    to a hundredth of the largest gradient of the model if that is larger.
    """
    plain_parameters, owners = dict(plain.named_parameters()), expert_owners(balanced)
    scales: dict[str, float] = {}  # by module
    for name, parameter in plain_parameters.items():
        module, size = name.rpartition(".")[0], gradient_of(parameter).abs().max().item()
        scales[module] = max(size, scales.get(module, 0.0))
    errors = {}
    for name, parameter in balanced.named_parameters():
        expected, actual = gradient_of(plain_parameters[name]), gradient_of(parameter)
        scale = max(scales[name.rpartition(".")[0]], max(scales.values()) / 100)
        if name in owners:
            expected = expected[list(owners[name].home_experts)]
        else:
            dist.all_reduce(actual)
        if actual.numel():
            errors[name] = (actual - expected).abs().max().item() / scale
    assert max(errors.values()) <= limit, {n: e for n, e in errors.items() if e > limit}


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is not None:
        return parameter.grad.clone()
    dtype = parameter.dtype if parameter.dtype.itemsize > 1 else torch.float32  # FP8 has no `max`
    return torch.zeros_like(parameter, dtype=dtype)


@contextmanager
def mapped_memory(group: Any) -> Iterator[None]:
    module = import_module("ultraep.integrations.transformers.balance")
    options = {"data_plane": "mapped", "peers": SharedPeers(group)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Balancer", partial(Balancer._with_settings, **options))
        yield


def compare(
    rank: int,
    group: Any,
    family: str,
    *,
    recompute: str | None = None,
    slots: int = 1,
    policy: str = "ultraep",
    autocast: bool = False,
    mapped: bool = False,
    dispatched: bool = False,
    limit: float = 1e-5,
    **options: Any,
) -> None:
    """Compare outputs and gradients of a balanced model with the unmodified model.

    recompute: "reentrant" or "not reentrant".   mapped: use the mapped data plane.
    dispatched: rows travel through a dispatcher of another library.   options: of `build`.
    """
    plain, model = build(family, **options), build(family, **options)
    plane = {"dispatcher": Differentiable(connect(group))} if dispatched else {}
    memory = mapped_memory(group) if mapped else nullcontext()
    with quiet(), memory, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = learn(plain, all_batches(group))[rank]
        balancer = balance(model, group, slots=slots, policy=policy, **plane)
        if recompute is not None:
            model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
            if recompute == "reentrant":
                model.enable_input_require_grads()
        (actual,) = learn(model, [batch(rank)])
    assert_close(actual, expected, limit)
    assert_same_gradients(model, plain, limit)
    assert rank or policy == "none" or balancer.stats()["copies"]
    balancer.close()


def compare_all(rank: int, group: Any, families: list[str], options: dict[str, Any]) -> None:
    for family in families:
        try:
            compare(rank, group, family, **options)
        except AssertionError as error:
            raise AssertionError(f"{family}: {error}") from error
