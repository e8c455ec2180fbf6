"""LoRA beside balanced experts, and auxiliary losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from equality import difference, quiet
from families import batch, build, loss, outputs
from peft import LoraConfig, get_peft_model

from ultraep import ConfigError, parallel
from ultraep.integrations.transformers import balance


def adapted(model: Any, **targets: Any) -> Any:
    """The model with adapters that are drawn alike everywhere, and are not zero."""
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, **targets))
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    return model


def lora(rank: int, group: Any, family: str, first: str) -> dict[str, float]:
    """Adapters of attention, put there before or after balancing; experts are frozen."""
    targets = {"target_modules": ["q_proj", "v_proj"]}
    plain, model = adapted(build(family), **targets), build(family)
    for other in range(group.size()):
        loss(outputs(plain, batch(other))).backward()
    want = outputs(plain, batch(rank))
    if first == "balance":
        balancer = balance(model, group)
        model = adapted(model, **targets)
    else:
        model = adapted(model, **targets)
        balancer = balance(model, group)
    got = outputs(model, batch(rank))
    loss(got).backward()
    found = {"outputs": (got - want).abs().max().item(), **difference(rank, model, plain)}
    found["learning"] = sum(p.grad is not None for p in model.parameters())
    parallel.leave_out_experts(model)
    torch.nn.parallel.DistributedDataParallel(model)  # is not refused, and leaves experts alone
    found["after"] = (outputs(model, batch(rank)) - got).abs().max().item()
    balancer.close()
    return found


def loras(rank: int, group: Any, cases: list[tuple[str, str]]) -> list[dict[str, float]]:
    with quiet():
        return [lora(rank, group, *case) for case in cases]


def lora_on_experts(rank: int, group: Any) -> list[str]:
    """What is said about adapters of experts, before and after balancing."""
    targets = {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}
    told = []
    with quiet():
        model = adapted(build("mixtral"), **targets)
        try:
            balance(model, group)
        except ConfigError as error:
            told.append(str(error))
        outputs(model, batch(rank))  # as it was
        model = build("mixtral")
        balancer = balance(model, group)
        model = adapted(model, **targets)
        try:
            outputs(model, batch(rank))
        except ConfigError as error:
            told.append(str(error))
        balancer.close()
    return told


def auxiliary(rank: int, group: Any, family: str) -> dict[str, float]:
    """Losses with `output_router_logits`: of each rank's own batch."""
    plain, model = build(family), build(family)
    for other in range(group.size()):
        ids = batch(other)
        told = plain(input_ids=ids, labels=ids, output_router_logits=True)
        told.loss.backward()
        if other == rank:
            want = told
    balancer = balance(model, group)
    ids = batch(rank)
    got = model(input_ids=ids, labels=ids, output_router_logits=True)
    got.loss.backward()
    found = {
        "loss": (got.loss - want.loss).abs().item(),
        "auxiliary": (got.aux_loss - want.aux_loss).abs().item(),
        "logits": max(
            (a - b).abs().max().item()
            for a, b in zip(got.router_logits, want.router_logits, strict=True)
        ),
        **difference(rank, model, plain),
    }
    assert got.aux_loss > 0
    balancer.close()
    dist.barrier()
    return found


def auxiliaries(rank: int, group: Any, families: list[str]) -> list[dict[str, float]]:
    with quiet():
        return [auxiliary(rank, group, family) for family in families]
