"""The library's own expert parallelism, with its dispatch and with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from checkpoints import same
from families import FAMILIES, batch, build, loss, outputs
from trainers import under_torchrun
from transformers.distributed import DistributedConfig

from ultraep.integrations.transformers import enable


def reference(family: str, rank: int, ranks: int, experts: str) -> tuple[Any, torch.Tensor]:
    """The unmodified model; FSDP2 averages over ranks."""
    plain = build(family, experts=experts)
    for other in range(ranks):
        values = outputs(plain, batch(other))
        (loss(values) / ranks).backward()
        if other == rank:
            wanted = values.detach()
    return plain, wanted


def compare_native(
    rank: int,
    group: Any,
    folder: Path,
    family: str,
    *,
    ep: int,
    ours: bool,
    recompute: bool = False,
) -> dict[str, Any]:
    """Differences of outputs, and of gradients relative to the largest of each tensor.

    ratio: of the norms of gradients of experts to what they should be.
    """
    experts = "grouped_mm"
    with under_torchrun(rank, group.size()):
        plain, wanted = reference(family, rank, group.size(), experts)
        if rank == 0 and not folder.exists():
            plain.save_pretrained(folder)
        dist.barrier()
        style = enable(slots=1) if ours else None
        try:
            model = (
                getattr(transformers, FAMILIES[family][0])
                .from_pretrained(
                    folder,
                    distributed_config=DistributedConfig(fsdp_size=group.size(), ep_size=ep),
                    experts_implementation=experts,
                    attn_implementation="eager",
                    dtype=torch.float32,
                )
                .train()
            )
        finally:
            if style is not None:
                style.disable()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        values = outputs(model, batch(rank))
        loss(values).backward()
        found = gradients(model, plain)
        found["outputs"] = (values.detach() - wanted).abs().max().item()
        model.save_pretrained(folder.with_suffix(".saved"))
        if rank == 0:
            again = type(plain).from_pretrained(folder.with_suffix(".saved"), dtype=torch.float32)
            found["saved"] = same(dict(again.state_dict()), dict(plain.state_dict()))
        if style is not None:
            found["layers"] = len(style.experts)
            found["copies"] = sum(b.stats()["copies"] for b in style.balancers.values())
            for balancer in style.balancers.values():
                balancer.close()
        dist.barrier()
    return found


def gradients(model: Any, plain: Any) -> dict[str, Any]:
    wanted = dict(plain.named_parameters())
    found: dict[str, Any] = {"dense": 0.0, "experts": 0.0, "ratios": set()}
    for name, parameter in model.named_parameters():
        want, got = wanted[name].grad, parameter.grad
        if want is None and got is None:
            continue
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        kind = "experts" if ".experts." in name else "dense"
        if kind == "experts":
            ratio = (got.norm() / want.norm()).item()
            found["ratios"].add(round(ratio, 3))
            got = got / ratio
        off = (got - want).abs().max().item() / want.abs().max().item()
        found[kind] = max(found[kind], off)
    return found
