"""torchtitan's own DeepEP and HybridEP dispatchers move the rows of balanced experts by slot id.

deep_ep is a strict stand-in (`titan_deep_ep`); the unmodified run uses the same dispatcher.
"""

from __future__ import annotations

import pytest
import titan_deep_ep
from ranks import shared_pool
from test_titan_equality import assert_same, planned
from titan_models import BALANCED
from titan_runs import one_pass

TWO_SLOTS = ((BALANCED, {"slots": 2}),)  # HybridEP needs a multiple of 4 slots on two ranks


def with_stand_ins(rank, group, *args):
    titan_deep_ep.install()
    return one_pass(rank, group, *args)


@pytest.mark.parametrize(
    ("dispatcher", "settings"),
    [
        ("deepep", {}),
        ("hybridep", {}),
        ("deepep", {"recompute": "full"}),
        ("hybridep", {"recompute": "selective"}),
        ("deepep", {"compiler": "aot_eager"}),
        ("hybridep", {"compiler": "aot_eager", "recompute": "full"}),
        ("hybridep", {"accumulate": 2}),
    ],
    ids=str,
)
def test_balanced(dispatcher, settings, tmp_path):
    options = {"folder": tmp_path, "dispatcher": dispatcher}
    plain = {name: value for name, value in settings.items() if name == "accumulate"}
    unmodified, balanced = (
        shared_pool().run(2, with_stand_ins, "qwen3", overrides, options | own)
        for overrides, own in (((), plain), (TWO_SLOTS, settings))
    )
    assert all(replicas > 0 for *_, replicas in planned(balanced))
    assert_same(unmodified, balanced)
