"""Generation with balanced models of transformers; test_transformers_trainer.py trains."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)

from equality import quiet
from families import NAMED, batch, build
from ranks import on_ranks

from ultraep.integrations.transformers import balance

THREE = ["mixtral", "gpt_oss", "deepseek_v3"]


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
