"""What torchtitan can be balanced with, as far as names decide; the framework itself is not needed.

Importing it takes seconds, and it is not installed everywhere: the module is read by itself.
Tests against the framework are in `tests/frameworks/torchtitan`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ultraep import BalanceConfig, ConfigError

PACKAGE = Path(__file__).parents[2] / "src" / "ultraep" / "integrations" / "torchtitan"


@pytest.fixture(scope="module")
def check():
    """The module `check`, without the package."""
    spec = importlib.util.spec_from_file_location("check_alone", PACKAGE / "check.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


KNOWN = ("RoutedExperts", "AllToAllTokenDispatcher", "GroupedExperts")


@pytest.mark.parametrize("experts", ["GroupedExperts", "GptOssGroupedExperts"])
def test_layers_that_can_be_balanced(check, experts):
    check.check_layer(*KNOWN[:2], experts)
    check.check_axes(["dp_replicate", "efsdp", "ep"])


@pytest.mark.parametrize(
    ("place", "name", "match"),
    [
        (0, "VendorRoutedExperts", "VendorRoutedExperts cannot be balanced"),
        (1, "LocalTokenDispatcher", "LocalTokenDispatcher cannot be balanced, it is unknown"),
        (
            1,
            "DeepEPTokenDispatcher",
            'fused and does not support spare slots: use AllTo.*"standard"',
        ),
        (1, "HybridEPTokenDispatcher", "HybridEPTokenDispatcher cannot be balanced, it is fused"),
        (1, "MinimalAsyncEPTokenDispatcher", "it is fused"),
        (1, "TorchAOTokenDispatcher", "pads tokens for FP8 experts"),
        (2, "Float8GroupedExperts", "do not include FP8 scales: use GroupedExperts or GptOss"),
        (2, "MXFP8GptOssGroupedExperts", "MXFP8GptOssGroupedExperts cannot be balanced"),
        (2, "FusedGroupedExperts", "are not tested with replicas"),
        (2, "MyExperts", "MyExperts cannot be balanced, it is unknown"),
    ],
)
def test_layers_that_cannot(check, place, name, match):
    layer = [*KNOWN]
    layer[place] = name
    with pytest.raises(ConfigError, match=match):
        check.check_layer(*layer)


def test_experts_that_are_not_spread_over_ranks(check):
    with pytest.raises(ConfigError, match="over the mesh axes none, not over ep: set parallelism"):
        check.check_axes([])
    with pytest.raises(ConfigError, match=r"dp, cp, tp, not over ep \(tensor-parallel experts"):
        check.check_axes(["dp", "cp", "tp"])


def test_options(check):
    given = check.balancer_options(2, "quota", {"tolerance": 0.1, "in_flight": 3})
    config = BalanceConfig(policy="quota", tolerance=0.1)
    assert given == {"slots": 2, "config": config, "in_flight": 3}
    with pytest.raises(
        ConfigError, match="unknown options, or set by torchtitan: group, slotz; use"
    ):
        check.balancer_options(1, "ultraep", {"slotz": 1, "group": None})
    with pytest.raises(ConfigError, match="nonsense"):
        check.balancer_options(1, "nonsense", {})
