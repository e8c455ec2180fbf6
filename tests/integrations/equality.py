"""A balanced model beside the unmodified one: every rank computes both, and compares."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from families import batch, build, loss, outputs
from safetensors.torch import load_file
from shared_peers import SharedPeers

from ultraep import parallel
from ultraep.integrations.transformers import balance, balanced_experts, balancers, unbalance

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@contextmanager
def quiet():
    """Warnings of the library and of torch that have nothing to do with balancing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def mixed(on: bool) -> Any:
    """Mixed precision, if it is on."""
    return torch.autocast("cpu", torch.bfloat16, enabled=on)


def reference(
    family: str, batches: list[torch.Tensor], autocast: bool, **options: Any
) -> tuple[Any, list[torch.Tensor]]:
    """The unmodified model, with gradients of the batches of all ranks, and its outputs."""
    model = build(family, **options)
    found = []
    for ids in batches:
        with mixed(autocast):
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
    autocast: bool = False,
    mapped: bool = False,
    **options: Any,
) -> dict[str, float]:
    """Largest differences of outputs and gradients between the two, and how many copies.

    recompute: "reentrant" or "not reentrant".   mapped: through memory that ranks map, as GPUs do.
    """
    batches = [batch(r) for r in range(group.size())]
    plain, wanted = reference(family, batches, autocast, **options)
    model = build(family, **options)
    plane = {"data_plane": "mapped", "peers": SharedPeers(group)} if mapped else {}
    balancer = balance(model, group, slots=slots, policy=policy, **plane)
    if recompute is not None:
        reentrant = recompute == "reentrant"
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
    with mixed(autocast):
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


def memory(rank: int, group: Any) -> tuple[int, int, int]:
    """Bytes that experts take before and after balancing, and what home experts need."""
    model = build("mixtral")
    stacks = [p for name, p in model.named_parameters() if ".experts." in name]
    before = sum(p.untyped_storage().nbytes() for p in stacks)
    balancer = balance(model, group)
    share = len(balancer.topology.home_experts(rank)) / balancer.topology.experts
    balancer.close()
    return before, sum(p.untyped_storage().nbytes() for p in stacks), int(before * share)


def two_groups(rank: int, group: Any, folder: Path) -> dict[str, Any]:
    """Four ranks, two groups of two: gradients over both, and one checkpoint."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alike = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with quiet():
        plain, model = build("mixtral"), build("mixtral")
        for other in range(4):
            (loss(outputs(plain, batch(other))) / 4).backward()
        balance(model, groups[rank // 2])
        loss(outputs(model, batch(rank))).backward()
        parallel.average_expert_gradients(model, alike[rank % 2])
        for parameter in parallel.dense_parameters(model).values():
            parameter.grad /= 4
        found = difference(rank, model, plain)
        model.save_pretrained(folder / "balanced")
        if rank == 0:
            plain.save_pretrained(folder / "plain")
        dist.barrier()
        one, two = (
            load_file(folder / name / "model.safetensors") for name in ("plain", "balanced")
        )
        found["saved"] = one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
        unbalance(model)
    return found


def other_numbers(rank: int, group: Any) -> dict[str, Any]:
    """A model whose second layer has four experts, and not eight: it has two balancers."""

    def two_numbers() -> Any:
        model, other = build("mixtral"), build("mixtral", num_local_experts=4)
        model.model.layers[1].mlp = other.model.layers[1].mlp
        return model

    with quiet():
        plain, model = two_numbers(), two_numbers()
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
