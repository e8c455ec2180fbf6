"""Unsupported settings are refused when overrides are applied, before the model is built."""

import pytest
import titan_models

# isort: split
import torch
import torchtitan.models.qwen3 as qwen3
from titan_models import BALANCED
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

from ultraep import ConfigError
from ultraep.integrations.torchtitan import BalancedRoutedExperts, check


def config_of(spec=None, **parallel):
    """Return the settings at the time when the Trainer applies overrides."""
    config = qwen3_moe_debug()
    config.model_spec = spec or titan_models.spec("qwen3")
    config.training.disable_cuda_graphs = True
    for name, value in {"expert_parallel_degree": 2, **parallel}.items():
        setattr(config.parallelism, name, value)
    config.training.seq_len = 64
    config.model_spec.model.update_from_config(config=config)
    return config


def apply(config, **options):
    return apply_overrides(OverrideConfig(imports=[(BALANCED, options)]), config)


def refused(config, match, **options):
    with pytest.raises(ConfigError, match=match):
        apply(config, **options)
    assert not any(config.traverse(BalancedRoutedExperts.Config))


def test_accepted_options():
    config = config_of()
    assert len(apply(config, slots=2, tolerance=0.01, timeout=30.0)) == 2
    (_, first, *_), _ = config.traverse(BalancedRoutedExperts.Config)
    assert first.balancer_options["slots"] == 2
    assert first.balancer_options["config"].tolerance == 0.01
    assert first.balancer_options["timeout"] == 30.0


def with_dispatcher(backend, **settings):
    config = config_of()
    for _, routed, *_ in config.traverse(RoutedExperts.Config):
        routed.token_dispatcher = dispatcher = qwen3.make_routed_experts_config(
            dim=8, hidden_dim=8, num_experts=8, top_k=2, param_init={}, comm_backend=backend
        ).token_dispatcher
        for name, value in settings.items():
            setattr(dispatcher, name, value)
    return config


@pytest.mark.parametrize("backend", ["standard", "deepep", "hybridep"])
def test_accepted_dispatchers(backend):
    assert len(apply(with_dispatcher(backend))) == 2


@pytest.mark.parametrize(
    ("backend", "settings", "reason"),
    [
        ("minimal_async_ep", {}, "its fixed number of rows is not tested"),
        ("deepep", {"cudagraphable": True}, "it delivers a fixed number of rows"),
        ("hybridep", {"non_blocking_capacity_factor": 0.5}, "it may drop rows"),
        ("hybridep", {"pad_multiple": 32}, "it pads the rows"),
    ],
)
def test_refused_dispatchers(backend, settings, reason):
    refused(with_dispatcher(backend, **settings), f"cannot be balanced, {reason}")


def test_experts_without_expert_parallelism():
    refused(config_of(expert_parallel_degree=1), "not over ep.*expert_parallel_degree")
    tensor = config_of(expert_parallel_degree=1, tensor_parallel_degree=2)
    refused(tensor, "tensor-parallel experts cannot be balanced")


@pytest.mark.parametrize(
    ("index", "name", "match"),
    [
        (0, "VendorRoutedExperts", "VendorRoutedExperts cannot be balanced"),
        (1, "LocalTokenDispatcher", "LocalTokenDispatcher cannot be balanced, it is unknown"),
        (1, "TorchAOTokenDispatcher", "pads tokens for FP8 experts"),
        (2, "Float8GroupedExperts", "do not include FP8 scales: use GroupedExperts or GptOss"),
        (2, "FusedGroupedExperts", "are not tested with replicas"),
        (2, "MyExperts", "MyExperts cannot be balanced, it is unknown"),
    ],
)
def test_names_of_unsupported_layers(index, name, match):
    layer = ["RoutedExperts", "AllToAllTokenDispatcher", "GroupedExperts"]
    check.check_layer(*layer)
    layer[index] = name
    with pytest.raises(ConfigError, match=match):
        check.check_layer(*layer)


def test_wrong_options():
    for message, options in {
        "unknown options, or set by torchtitan: group, slotz; use": {"slotz": 1, "group": None},
        "tolerance must lie between 0 and 1000, got -1": {"tolerance": -1},
        "nonsense": {"policy": "nonsense"},
    }.items():
        refused(config_of(), message, **options)


def test_experts_without_a_process_group():
    config = config_of()
    apply(config)
    experts = config.model_spec.model.layers[0].moe.routed_experts.build()
    with pytest.raises(ConfigError, match="call parallelize"):
        experts(torch.zeros(1, 2, 64), *(torch.zeros(1, 2, 2) for _ in range(2)), torch.zeros(8))
