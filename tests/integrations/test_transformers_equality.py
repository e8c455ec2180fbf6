"""Balanced models of transformers compute what the unmodified ones do, in one process."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)

from equality import compare_all, idle_blocks, memory, other_numbers, two_groups
from families import FAMILIES, NOT_BUILT, families_of_the_library
from ranks import shared_pool

NAMED = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss"]
CHUNKS = [sorted(FAMILIES)[i::4] for i in range(4)]


def check(cases, ranks=2, limit=1e-5):
    """All cases on so many ranks; some of them must have had copies."""
    found = shared_pool().run(ranks, compare_all, cases)
    for case, *of_ranks in zip(cases, *found, strict=True):
        for one in of_ranks:
            assert one["outputs"] <= limit * one["scale"], (case, of_ranks)
            assert max(one["dense"], one["experts"]) <= limit, (case, of_ranks)
    if all(case.get("policy") != "none" for case in cases):
        assert all(of_ranks[0]["copies"] for of_ranks in zip(*found, strict=True))


def test_every_family_of_the_registry_is_listed():
    assert families_of_the_library() == FAMILIES.keys() | NOT_BUILT.keys()
    assert not FAMILIES.keys() & NOT_BUILT.keys()


@pytest.mark.parametrize("families", CHUNKS, ids=lambda names: names[0])
def test_logits_and_gradients_of_every_family(families):
    check([{"family": family, "experts": "grouped_mm"} for family in families])


def test_eager_experts():
    others = FAMILIES.keys() & {"zaya", "muse_spark", "nemotron_h"}
    check([{"family": family} for family in [*NAMED, *sorted(others)]])


def test_batched_experts():
    check([{"family": family, "experts": "batched_mm"} for family in ("mixtral", "gpt_oss")])


def test_four_ranks_and_two_slots():
    check([{"family": f, "experts": "grouped_mm", "slots": 2} for f in NAMED], ranks=4)


def test_experts_that_do_not_divide_evenly():
    check([{"family": f} for f in ("mixtral", "gpt_oss", "qwen3_moe")], ranks=3)
    check([{"family": "mixtral", "num_local_experts": 3}], ranks=4)


def test_through_mapped_memory():
    check([{"family": f, "experts": "grouped_mm", "mapped": True} for f in ("mixtral", "gpt_oss")])


def test_without_balancing():
    check([{"family": f, "policy": "none"} for f in ("mixtral", "gpt_oss")])


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_recompute(recompute):
    check([{"family": f, "experts": "grouped_mm", "recompute": recompute} for f in NAMED])


def test_float64():
    check([{"family": family, "dtype": torch.float64} for family in NAMED], limit=1e-12)


def test_bfloat16():
    families = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
    cases = [{"family": f, "dtype": torch.bfloat16, "experts": "grouped_mm"} for f in families]
    check([*cases, {"family": "mixtral", "dtype": torch.bfloat16}], limit=0.05)


def test_mixed_precision():
    both = ("eager", "grouped_mm")
    check([{"family": "qwen3_moe", "autocast": True, "experts": e} for e in both], limit=0.02)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_ranks_without_tokens(experts):
    for of_rank in shared_pool().run(2, idle_blocks, NAMED, experts):
        for found in of_rank:
            assert max(found.values()) <= 1e-5, found


def test_layers_with_other_numbers_of_experts_have_their_own_balancer():
    for found in shared_pool().run(2, other_numbers):
        assert max(found["dense"], found["experts"]) <= 1e-5
        assert found["numbers"] == [8, 4]
        assert found["equal"]


def test_a_rank_has_memory_for_its_home_experts_only():
    for before, after, needed in shared_pool().run(3, memory):
        assert after == needed < before


def test_two_groups_that_have_the_same_experts(tmp_path):
    for found in shared_pool().run(4, two_groups, tmp_path):
        assert max(found["dense"], found["experts"]) <= 1e-5
        assert found["saved"]
