"""torchtitan's own DeepEP and HybridEP dispatchers move the rows of balanced experts by slot id.

deep_ep is a strict stand-in (`titan_deep_ep`); the unmodified run uses the same dispatcher.
"""

from __future__ import annotations

import pytest
from test_titan_equality import assert_same, planned
from titan_models import BALANCED

TWO_SLOTS = ((BALANCED, {"slots": 2}),)  # HybridEP needs a multiple of 4 slots on two ranks


@pytest.mark.parametrize(
    ("dispatcher", "settings"),
    [
        ("deepep", {}),
        ("deepep", {"recompute": "full"}),
        ("hybridep", {"recompute": "selective"}),
        ("deepep", {"compiler": "aot_eager"}),
        ("hybridep", {"compiler": "aot_eager", "recompute": "full"}),
        ("hybridep", {"accumulate": 2}),
    ],
    ids=str,
)
def test_balanced(dispatcher, settings, passes):
    plain = {name: value for name, value in settings.items() if name == "accumulate"}
    unmodified = passes("qwen3", 2, dispatcher=dispatcher, **plain)
    balanced = passes("qwen3", 2, TWO_SLOTS, dispatcher=dispatcher, **settings)
    assert all(replicas > 0 for *_, replicas in planned(balanced))
    assert_same(unmodified, balanced)
