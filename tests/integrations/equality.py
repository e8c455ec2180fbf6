"""A balanced model beside the unmodified one: every rank computes both, and compares."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
import transformers
from families import batch, build, loss, outputs
from shared_peers import SharedPeers

from ultraep.integrations.transformers import balance, balanced_experts

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings of the library and of torch, which have nothing to do with balancing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def under_torchrun(rank: int, size: int) -> Iterator[None]:
    """Set the environment that torchrun gives its processes; the process group stays."""
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
    """Reset the ranks that accelerate stores for a process; every test has another group."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def learn(model: Any, batches: list[torch.Tensor], scale: float = 1.0) -> list[torch.Tensor]:
    """The outputs for these batches; their gradients add up in the model."""
    values = [outputs(model, ids) for ids in batches]
    for value in values:
        (scale * loss(value)).backward()
    return [value.detach() for value in values]


def all_batches(group: Any) -> list[torch.Tensor]:
    return [batch(rank) for rank in range(group.size())]


def assert_close(got: torch.Tensor, want: torch.Tensor, limit: float = 1e-5) -> None:
    """Equal up to this part of the largest value."""
    off, scale = (got - want).abs().max().item(), want.abs().max().item()
    assert off <= limit * scale, f"off by {off:.3g}, largest value {scale:.3g}"


def assert_same_gradients(balanced: Any, plain: Any, limit: float = 1e-5) -> None:
    """All gradients of a balanced model are those of the plain one, summed over ranks.

    Limits are relative to the largest gradient of a tensor. Where a tensor has hardly any, a
    hundredth of the largest gradient of the model is its scale.
    """
    expected = dict(plain.named_parameters())
    largest = max(p.grad.abs().max().item() for p in expected.values() if p.grad is not None)
    homes = {
        f"{name}.{key}": list(module.home_experts)
        for name, module in balanced_experts(balanced).items()
        for key in module.bundle
    }
    errors = {}
    for name, parameter in balanced.named_parameters():
        want = expected[name].grad
        want = torch.zeros_like(expected[name]) if want is None else want
        got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        scale = max(want.abs().max().item(), largest / 100)
        if name in homes:
            want = want[homes[name]]
        else:
            dist.all_reduce(got)
        if got.numel():
            errors[name] = (got - want).abs().max().item() / scale
    assert max(errors.values()) <= limit, {n: e for n, e in errors.items() if e > limit}


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
    limit: float = 1e-5,
    **options: Any,
) -> None:
    """Outputs and gradients of a balanced model are those of the unmodified one.

    recompute: "reentrant" or "not reentrant".   mapped: through memory that ranks map, as GPUs do.
    options: of `build`.
    """
    plain, model = build(family, **options), build(family, **options)
    plane = {"data_plane": "mapped", "peers": SharedPeers(group)} if mapped else {}
    with quiet(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        want = learn(plain, all_batches(group))[rank]
        balancer = balance(model, group, slots=slots, policy=policy, **plane)
        if recompute is not None:
            model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
            if recompute == "reentrant":
                model.enable_input_require_grads()
        (got,) = learn(model, [batch(rank)])
    assert_close(got, want, limit)
    assert_same_gradients(model, plain, limit)
    assert rank or policy == "none" or balancer.stats()["copies"]
    balancer.close()


def compare_all(rank: int, group: Any, families: list[str], options: dict[str, Any]) -> None:
    for family in families:
        try:
            compare(rank, group, family, **options)
        except AssertionError as error:
            raise AssertionError(f"{family}: {error}") from error
