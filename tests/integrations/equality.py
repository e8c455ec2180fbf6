"""A balanced model beside the unmodified one: every rank computes both, and compares."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import transformers
from families import batch, build, loss, outputs

from ultraep.integrations.transformers import balance, balanced_experts, balancers, unbalance

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@contextmanager
def quiet():
    """Warnings of the library and of torch that have nothing to do with balancing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def reference(family: str, sizes: list[Any], **options: Any) -> tuple[Any, list[torch.Tensor]]:
    """The unmodified model, with gradients of the batches of all ranks, and its outputs."""
    model = build(family, **options)
    found = []
    for ids in sizes:
        values = outputs(model, ids)
        loss(values).backward()
        found.append(values.detach())
    return model, found


def difference(rank: int, balanced: Any, plain: Any) -> dict[str, float]:
    """The largest differences of gradients, each over the largest gradient of its tensor.

    Where a tensor has hardly any, a hundredth of the largest gradient of the model is its scale.
    """
    wanted = dict(plain.named_parameters())
    largest = max(p.grad.abs().max().item() for p in wanted.values() if p.grad is not None)
    homes = {
        f"{name}.{key}": list(module.home_experts)
        for name, module in balanced_experts(balanced).items()
        for key in module.bundle
    }
    worst = {"dense": 0.0, "experts": 0.0}
    for name, parameter in balanced.named_parameters():
        want = wanted[name].grad
        got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        want = torch.zeros_like(wanted[name]) if want is None else want
        scale = max(want.abs().max().item(), largest / 100)
        if name in homes:
            want = want[homes[name]]
        else:
            dist.all_reduce(got)
        off = (got - want).abs().max().item() / scale if got.numel() else 0.0
        kind = "experts" if name in homes else "dense"
        worst[kind] = max(worst[kind], off)
    return worst


def compare(
    rank: int,
    group: Any,
    family: str,
    *,
    recompute: str | None = None,
    slots: int = 1,
    policy: str = "ultraep",
    sizes: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, float]:
    """Largest differences of outputs and gradients between the two, and how many copies.

    recompute: "reentrant" or "not reentrant".
    """
    batches = [batch(r) for r in range(group.size())]
    plain, wanted = reference(family, batches, **options, **(sizes or {}))
    model = build(family, **options, **(sizes or {}))
    balancer = balance(model, group, slots=slots, policy=policy)
    if recompute is not None:
        reentrant = recompute == "reentrant"
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
    values = outputs(model, batches[rank])
    loss(values).backward()
    found = difference(rank, model, plain)
    found["outputs"] = (values.detach() - wanted[rank]).abs().max().item()
    found["scale"] = wanted[rank].abs().max().item()
    found["copies"] = balancer.stats()["copies"]
    balancer.close()
    return found


def idle_block(rank: int, group: Any, family: str, experts: str) -> dict[str, float]:
    """One block of experts where rank 0 has tokens, and no other rank has any."""
    plain, model = build(family, experts=experts), build(family, experts=experts)
    balancer = balance(model, group)
    tokens = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(5))
    found = {}
    blocks, others = ([m for m in one.modules() if hasattr(m, "experts")] for one in (model, plain))
    for block, other in zip(blocks, others, strict=True):
        want, got = other(tokens), block(tokens if rank == 0 else tokens[:, :0])
        want, got = (y[0] if isinstance(y, tuple) else y for y in (want, got))
        (got.square().sum() + sum(p.sum() * 0 for p in block.parameters())).backward()
        want.square().sum().backward()
        found["outputs"] = (got - want).abs().max().item() if rank == 0 else float(got.numel())
    balanced_part = difference(rank, model, plain)
    balancer.close()
    return found | balanced_part


def idle_blocks(rank: int, group: Any, families: list[str], experts: str) -> list[dict[str, float]]:
    with quiet():
        return [idle_block(rank, group, family, experts) for family in families]


def other_numbers(rank: int, group: Any) -> dict[str, Any]:
    """A model whose second layer has four experts, and not eight: it has two balancers."""

    def mixed() -> Any:
        model, other = build("mixtral"), build("mixtral", num_local_experts=4)
        model.model.layers[1].mlp = other.model.layers[1].mlp
        return model

    with quiet():
        plain, model = mixed(), mixed()
        for r in range(group.size()):
            loss(outputs(plain, batch(r))).backward()
        first = balance(model, group)
        loss(outputs(model, batch(rank))).backward()
        found = difference(rank, model, plain)
        owners = balancers(model)
        found["numbers"] = [b.topology.experts for b in owners]
        assert first in owners
        unbalance(model)
        found["equal"] = all(
            torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
        )
    return found


def compare_all(rank: int, group: Any, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    with quiet():
        return [compare(rank, group, **case) for case in cases]
