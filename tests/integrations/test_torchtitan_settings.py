"""Checks of torchtitan settings that need only names, without importing the framework.

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
    """Load the module `check` without its package, which imports the framework."""
    spec = importlib.util.spec_from_file_location("check_alone", PACKAGE / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KNOWN = ("RoutedExperts", "AllToAllTokenDispatcher", "GroupedExperts")


@pytest.mark.parametrize("experts", ["GroupedExperts", "GptOssGroupedExperts"])
def test_supported_layers(check, experts):
    check.check_layer(*KNOWN[:2], experts)
    check.check_axes(["dp_replicate", "efsdp", "ep"])


@pytest.mark.parametrize(
    ("index", "name", "match"),
    [
        (0, "VendorRoutedExperts", "VendorRoutedExperts cannot be balanced"),
        (1, "LocalTokenDispatcher", "LocalTokenDispatcher cannot be balanced, it is unknown"),
        (1, "MinimalAsyncEPTokenDispatcher", 'not tested with spare slots: use AllTo.*"standard"'),
        (1, "TorchAOTokenDispatcher", "pads tokens for FP8 experts"),
        (2, "Float8GroupedExperts", "do not include FP8 scales: use GroupedExperts or GptOss"),
        (2, "MXFP8GptOssGroupedExperts", "MXFP8GptOssGroupedExperts cannot be balanced"),
        (2, "FusedGroupedExperts", "are not tested with replicas"),
        (2, "MyExperts", "MyExperts cannot be balanced, it is unknown"),
    ],
)
def test_unsupported_layers(check, index, name, match):
    layer = [*KNOWN]
    layer[index] = name
    with pytest.raises(ConfigError, match=match):
        check.check_layer(*layer)


def test_experts_without_expert_parallelism(check):
    with pytest.raises(ConfigError, match="over the mesh axes none, not over ep: set parallelism"):
        check.check_axes([])
    with pytest.raises(ConfigError, match=r"dp, cp, tp, not over ep \(tensor-parallel experts"):
        check.check_axes(["dp", "cp", "tp"])


def test_options(check):
    options = check.balancer_options(2, "none", {"tolerance": 0.1, "in_flight": 3})
    config = BalanceConfig(policy="none", tolerance=0.1)
    assert options == {"slots": 2, "config": config, "in_flight": 3}
    message = "unknown options, or set by torchtitan: group, slotz; use"
    with pytest.raises(ConfigError, match=message):
        check.balancer_options(1, "ultraep", {"slotz": 1, "group": None})
    with pytest.raises(ConfigError, match="tolerance must lie between 0 and 1000, got -1"):
        check.balancer_options(1, "ultraep", {"tolerance": -1})
    with pytest.raises(ConfigError, match="nonsense"):
        check.balancer_options(1, "nonsense", {})
