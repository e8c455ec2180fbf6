"""One batch through torchtitan's Trainer: outputs, losses and gradients are those of the framework.

Experts multiply in float32; `torchtitan_cpu` lists the other differences on CPUs.
"""

from __future__ import annotations

import pytest
import torch
from ranks import shared_pool
from titan_models import BALANCED
from titan_runs import one_pass

ULTRAEP, NONE = ((BALANCED, {"slots": 1}),), ((BALANCED, {"policy": "none"}),)
LIMIT = 1e-5  # relative to the largest value of a tensor
TENSOR_PARALLEL = {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1}
CASES = {  # family, ranks, settings of both runs
    "qwen3": ("qwen3", 2, {}),
    "deepseek_v3": ("deepseek_v3", 2, {}),
    "gpt_oss": ("gpt_oss", 2, {}),
    "gradient accumulation": ("qwen3", 2, {"accumulate": 3}),
    "experts sharded over two ranks": ("qwen3", 4, {}),
    "two ranks with the same batch": ("qwen3", 2, TENSOR_PARALLEL),
    "everything a DTensor": ("qwen3", 2, {"backend": "full_dtensor"}),
    "bfloat16": ("qwen3", 2, {"bfloat16": True}),
    "forced balance": ("qwen3", 2, {"forced": True}),
}


def assert_same(plain, balanced, limit=LIMIT):
    """Assert equal outputs, losses and gradients on every rank."""
    for (outputs, loss, gradients, _), (ours, our_loss, our_gradients, _) in zip(
        plain, balanced, strict=True
    ):
        torch.testing.assert_close(our_loss, loss, rtol=limit, atol=0)
        off = {"outputs": distance(ours, outputs)}
        assert our_gradients.keys() == gradients.keys()
        off |= {name: distance(our_gradients[name], gradients[name]) for name in gradients}
        assert {name: value for name, value in off.items() if not value <= limit} == {}
        experts = [n for n in gradients if "inner_experts" in n]
        assert experts
        assert all(gradients[name].abs().max() > 0 for name in experts)


def distance(ours, theirs):
    return ((ours.double() - theirs.double()).abs().max() / theirs.abs().max()).item()


@pytest.fixture(scope="module")
def passes(tmp_path_factory):
    """Runs one pass; unmodified passes are computed once."""
    known = {}

    def run(family, size, overrides=(), **settings):
        key = family, size, overrides == (), repr(settings)
        if key not in known or overrides:
            settings["folder"] = tmp_path_factory.mktemp("pass")
            known[key] = shared_pool().run(size, one_pass, family, overrides, settings)
        return known[key]

    return run


def planned(results):
    """Return index, imbalance before and after, and replicas of each layer."""
    first, *others = [layers for *_, layers in results]
    assert others == [first] * len(others)
    assert [index for index, *_ in first] == list(range(len(first)))
    return first


@pytest.mark.parametrize("case", CASES)
def test_balanced(case, passes):
    family, size, settings = CASES[case]
    balanced = passes(family, size, ULTRAEP, **settings)
    for _, before, after, replicas in planned(balanced) if size == 2 else ():  # one group
        assert replicas == 0 and before == after == 1 if "forced" in settings else replicas > 0
    limit = 0.03 if "bfloat16" in settings else LIMIT
    assert_same(passes(family, size, **settings), balanced, limit)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_activation_checkpointing(recompute, passes):
    balanced = passes("qwen3", 2, ULTRAEP, recompute=recompute)
    assert sum(replicas for *_, replicas in planned(balanced)) > 0
    assert_same(passes("qwen3", 2), balanced)


def test_without_balancing(passes):
    balanced = passes("qwen3", 2, NONE)
    assert all(
        replicas == 0 and after == before > 1 for _, before, after, replicas in planned(balanced)
    )
    assert_same(passes("qwen3", 2), balanced)
