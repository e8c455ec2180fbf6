"""Steps of training and of generation, balanced and not, on the same data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from equality import quiet
from families import batch, build, loss, outputs

from ultraep import parallel
from ultraep.integrations.transformers import balance

CLIP, STEPS = 0.5, 20


def draw_batches(rank: int, step: int) -> torch.Tensor:
    return batch(rank + 10 * step)[:, :11]


def losses_alone(family: str, ranks: int, **options: Any) -> list[float]:
    """Of the unmodified model, which has the batches of all ranks."""
    model = build(family, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(ranks):
            value = loss(outputs(model, draw_batches(rank, step))) / ranks
            value.backward()
            total += value.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        found.append(total)
    return found


def losses_balanced(rank: int, group: Any, family: str, **options: Any) -> list[float]:
    model = build(family, **options)
    balancer = balance(model, group)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss(outputs(wrapped, draw_batches(rank, step)))
        value.backward()
        parallel.average_expert_gradients(model)
        parallel.clip_grad_norm(model, CLIP)
        optimizer.step()
        total = value.detach().clone() / group.size()
        dist.all_reduce(total)
        found.append(total.item())
    assert balancer.stats()["copies"]
    balancer.close()
    return found


def train_both(rank: int, group: Any, cases: list[dict[str, Any]]) -> list[Any]:
    with quiet():
        return [
            (losses_alone(ranks=group.size(), **case), losses_balanced(rank, group, **case))
            for case in cases
        ]


def generate_both(
    rank: int, group: Any, families: list[str], experts: str, **options: Any
) -> list[Any]:
    with quiet():
        return [generate(rank, group, family, experts, **options) for family in families]


def generate(rank: int, group: Any, family: str, experts: str, **options: Any) -> Any:
    """Tokens of each rank's own prompts, which have other lengths and numbers everywhere.

    Rank 0 is done early: it has what ends its sentence after three tokens.
    """
    prompts = batch(rank, rows=1, length=4 + 3 * rank)[: 1 + rank]
    told = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "max_new_tokens": 9}
    plain, model = build(family, experts=experts).eval(), build(family, experts=experts).eval()
    free = plain.generate(prompts, eos_token_id=None, **(told | options))
    end = int(free[0, prompts.shape[1] + 2]) if rank == 0 else None
    want = plain.generate(prompts, eos_token_id=end, **(told | options))
    balancer = balance(model, group)
    got = model.generate(prompts, eos_token_id=end, **(told | options))
    balancer.close()
    return want.tolist(), got.tolist(), prompts.shape[1]
