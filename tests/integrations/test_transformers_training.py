"""Training and generation with balanced models of transformers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)

import torch.distributed as dist
from equality import quiet
from families import NAMED, batch, build, loss, outputs
from ranks import on_ranks

from ultraep import parallel
from ultraep.integrations.transformers import balance

CLIP, STEPS = 0.5, 20
THREE = ["mixtral", "gpt_oss", "deepseek_v3"]


def train(model, losses_of_step, clip):
    """Return the losses of all steps. losses_of_step: the losses of this process in a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    totals = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for value in losses_of_step(step):
            value.backward()
            total += value.detach()
        clip()
        optimizer.step()
        totals.append(total)
    return torch.stack(totals)


@pytest.mark.parametrize(
    ("family", "options", "limit"),
    [
        ("mixtral", {"dtype": torch.float64}, 1e-12),
        *(
            pytest.param(family, {"experts": "grouped_mm"}, 1e-4, marks=pytest.mark.slow)
            for family in THREE
        ),
    ],
)
@on_ranks(2)
def test_losses_of_twenty_steps(rank, group, family, options, limit):
    ranks = group.size()
    with quiet():
        plain, model = build(family, **options), build(family, **options)
        balancer = balance(model, group)
        wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)

        def alone(step):
            return (
                loss(outputs(plain, batch(r + 10 * step)[:, :11])) / ranks for r in range(ranks)
            )

        def balanced(step):
            return [loss(outputs(wrapped, batch(rank + 10 * step)[:, :11]))]

        def clip_balanced():
            parallel.average_expert_gradients(model)
            parallel.clip_grad_norm(model, CLIP)

        def clip_alone():
            torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)

        expected = train(plain, alone, clip_alone)
        losses = train(model, balanced, clip_balanced) / ranks
        dist.all_reduce(losses)
        assert balancer.stats()["copies"]
        balancer.close()
    assert abs(expected[-1] - expected[0]) > 100  # it learns
    torch.testing.assert_close(losses, expected, rtol=limit, atol=0)


@pytest.mark.parametrize(
    ("families", "options"),
    [
        (["mixtral"], {"experts": "eager"}),
        (THREE, {"experts": "grouped_mm"}),
        pytest.param(NAMED, {"experts": "grouped_mm"}, marks=pytest.mark.slow),
        pytest.param(
            THREE,
            {"experts": "grouped_mm", "cache_implementation": "static"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["eager", "grouped", "more families", "static cache"],
)
@on_ranks(2)
def test_generation(rank, group, families, options):
    """Prompts differ in length and number between ranks; rank 0 ends after three tokens."""
    options = dict(options)
    experts = options.pop("experts")
    prompts = batch(rank, rows=1, length=4 + 3 * rank)[: 1 + rank]
    length = prompts.shape[1]
    options |= {"attention_mask": torch.ones_like(prompts), "do_sample": False, "max_new_tokens": 9}
    with quiet():
        for family in families:
            plain, model = (build(family, experts=experts).eval() for _ in range(2))
            free = plain.generate(prompts, eos_token_id=None, **options)
            end = int(free[0, length + 2]) if rank == 0 else None
            expected = plain.generate(prompts, eos_token_id=end, **options)
            balancer = balance(model, group)
            tokens = model.generate(prompts, eos_token_id=end, **options)
            balancer.close()
            assert torch.equal(tokens, expected), (family, tokens, expected)
            assert tokens.shape[1] <= length + 3 if rank == 0 else tokens.shape == (2, length + 9)
