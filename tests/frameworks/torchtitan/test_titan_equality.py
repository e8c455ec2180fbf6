"""Balanced beside unmodified: outputs, losses and all gradients are the same.

One batch through the Trainer, forward and backward, of tiny models of every family that the release
has. Experts multiply in float32 (`torchtitan_cpu` says what else is otherwise on CPUs).
"""

from __future__ import annotations

import pytest
import torch
from ranks import shared_pool
from titan_models import BALANCED
from titan_runs import one_pass

ULTRAEP, NONE = ((BALANCED, {"slots": 1}),), ((BALANCED, {"policy": "none"}),)
LIMIT = 1e-5  # of the largest number of a tensor


def passes(size, family, overrides, **given):
    return shared_pool().run(size, one_pass, family, overrides, given)


def assert_same(plain, balanced, limit=LIMIT):
    """On every rank; gradients of the same parameters, and all of them."""
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


def planned(found):
    """What was planned for the layers, alike on all ranks."""
    (first, *others) = [layers for *_, layers in found]
    assert others == [first] * len(others)
    assert [index for index, *_ in first] == list(range(len(first)))
    return first


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Passes of unmodified models, each computed once."""
    known = {}

    def found(family, size=2, **given):
        key = family, size, repr(sorted(given.items()))
        if key not in known:
            folder = tmp_path_factory.mktemp("plain")
            known[key] = passes(size, family, (), folder=folder, **given)
        return known[key]

    return found


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "gpt_oss"])
def test_every_family(family, plain, tmp_path):
    balanced = passes(2, family, ULTRAEP, folder=tmp_path)
    layers = planned(balanced)
    assert all(copies > 0 and after < before for _, before, after, copies in layers)
    assert_same(plain(family), balanced)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_activation_checkpointing(recompute, plain, tmp_path):
    balanced = passes(2, "qwen3", ULTRAEP, folder=tmp_path, recompute=recompute)
    assert sum(copies for *_, copies in planned(balanced)) > 0
    assert_same(plain("qwen3"), balanced)


def test_gradient_accumulation(plain, tmp_path):
    balanced = passes(2, "qwen3", ULTRAEP, folder=tmp_path, accumulate=3)
    assert_same(plain("qwen3", accumulate=3), balanced)


def test_without_balancing_the_numbers_are_those_of_the_framework(plain, tmp_path):
    balanced = passes(2, "qwen3", NONE, folder=tmp_path)
    assert all(
        copies == 0 and after == before > 1 for _, before, after, copies in planned(balanced)
    )
    assert_same(plain("qwen3"), balanced)


def test_forced_balance_beside_it(plain, tmp_path):
    """The framework's own flag: rows are even by themselves, and no copy is made."""
    balanced = passes(2, "qwen3", ULTRAEP, folder=tmp_path, forced=True)
    assert all(
        before == after == 1 and copies == 0 for _, before, after, copies in planned(balanced)
    )
    assert_same(plain("qwen3", forced=True), balanced)


def test_sharded_experts(plain, tmp_path):
    """Four ranks: FSDP2 of four for dense weights, of two for experts, which two ranks share."""
    balanced = passes(4, "qwen3", ULTRAEP, folder=tmp_path)
    assert_same(plain("qwen3", size=4), balanced)


def test_tokens_split_by_tensor_parallelism(plain, tmp_path):
    """Two ranks have the same batch, and each sends half of its tokens to the experts."""
    given = {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1}
    balanced = passes(2, "qwen3", ULTRAEP, folder=tmp_path, **given)
    assert_same(plain("qwen3", **given), balanced)


def test_everything_a_dtensor(plain, tmp_path):
    given = {"backend": "full_dtensor"}
    assert_same(plain("qwen3", **given), passes(2, "qwen3", ULTRAEP, folder=tmp_path, **given))


def test_bfloat16(plain, tmp_path):
    """In the types that the framework has by itself: as close as these are."""
    balanced = passes(2, "qwen3", ULTRAEP, folder=tmp_path, bfloat16=True)
    assert_same(plain("qwen3", bfloat16=True), balanced, limit=0.03)
