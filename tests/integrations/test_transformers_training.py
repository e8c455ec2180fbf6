"""Training and generation with balanced models of transformers."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)

from ranks import shared_pool
from training import generate_both, train_both

NAMED = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss"]


def test_twenty_steps_have_the_same_losses():
    families = ("mixtral", "deepseek_v3", "gpt_oss")
    cases = [{"family": family, "experts": "grouped_mm"} for family in families]
    for of_rank in shared_pool().run(2, train_both, cases):
        for alone, balanced in of_rank:
            assert len(alone) == 20
            assert abs(alone[-1] - alone[0]) > 100  # it learns
            assert balanced == pytest.approx(alone, rel=1e-4)


def test_twenty_steps_in_float64():
    cases = [{"family": family, "dtype": torch.float64} for family in ["mixtral"]]
    for of_rank in shared_pool().run(2, train_both, cases):
        for alone, balanced in of_rank:
            assert balanced == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_is_identical(cache):
    options = {"experts": "grouped_mm"}
    if cache == "static":
        options |= {"cache_implementation": "static"}
    first, second = shared_pool().run(2, partial(generate_both, **options), NAMED)
    for want, got, prompt in first:
        assert got == want
        assert len(got[0]) <= prompt + 3  # it was done before the other rank
    for want, got, prompt in second:
        assert got == want
        assert [len(row) for row in got] == [prompt + 9] * 2


def test_generation_with_eager_experts():
    for of_rank in shared_pool().run(2, partial(generate_both, experts="eager"), ["mixtral"]):
        for want, got, _ in of_rank:
            assert got == want
