"""Checkpoints of balanced models are those of the library; loading one reads home experts only."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)

from checkpoints import pieces_at_once, round_trips, what_is_read
from families import FAMILIES
from ranks import shared_pool

# The library itself cannot load this text model alone: its class does not know its configuration.
ALONE = sorted(FAMILIES.keys() - {"mistral_large4"})


@pytest.mark.parametrize("families", [ALONE[i::2] for i in range(2)], ids=["one", "two"])
def test_every_family_is_saved_and_loaded_both_ways(families, tmp_path):
    for of_rank in shared_pool().run(2, round_trips, tmp_path, families):
        for family, found in zip(families, of_rank, strict=True):
            assert all(found.values()), (family, found)


def test_experts_that_do_not_divide_evenly(tmp_path):
    uneven = partial(round_trips, num_local_experts=5)
    for found in shared_pool().run(2, uneven, tmp_path, ["mixtral", "gpt_oss"]):
        assert all(all(one.values()) for one in found), found


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_rank_reads_its_home_experts_only(family, tmp_path):
    for read, has in shared_pool().run(2, what_is_read, tmp_path / family):
        assert read == has


def test_experts_of_one_layer_are_gathered_at_once():
    writer, other = shared_pool().run(2, pieces_at_once)
    assert [layers for _, layers in writer] == [set(), {"0"}, {"1"}]
    assert [size for size, _ in other] == [0, 0, 0]
