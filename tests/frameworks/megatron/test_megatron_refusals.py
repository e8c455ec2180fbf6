"""Unsupported models are refused when they are built, before anything is allocated."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from megatron_models import make_layer, on_megatron, settings

from ultraep import ConfigError


def message_of(build, *args, **options):
    """Return the error message; fail if a parameter or a balancer was created before."""
    from ultraep.integrations import common

    with (
        patch.object(torch.nn.Parameter, "__new__", side_effect=AssertionError("allocated")),
        patch.object(common, "Balancer", side_effect=AssertionError("joined")),
        pytest.raises(ConfigError) as error,
    ):
        build(*args, **options)
    return str(error.value)


@on_megatron(1)
def test_unsupported_experts_settings_and_options():
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    from ultraep.integrations.megatron import BalancedMoELayer, balanced
    from ultraep.integrations.megatron.experts import parts_of

    config = settings()
    linear = MLPSubmodules(linear_fc1=torch.nn.Linear, linear_fc2=torch.nn.Linear)
    experts = {
        "TEGroupedMLP": ModuleSpec(module=TEGroupedMLP, submodules=linear),
        "Linear": ModuleSpec(module=SequentialMLP, submodules=linear),
        "Identity": torch.nn.Identity,
    }
    for name, spec in experts.items():
        assert name in message_of(BalancedMoELayer, config, MoESubmodules(experts=spec))
    spec = get_moe_module_spec(use_te=False, num_experts=8)
    graphs = SimpleNamespace(**(vars(config) | {"cuda_graph_impl": "local"}))
    _, submodules = parts_of(spec)
    for arguments in ((balanced, spec, graphs), (BalancedMoELayer, graphs, submodules)):
        assert "cuda_graph_impl" in message_of(*arguments)
    assert "domain" in message_of(balanced, spec, config, domain=1)
    linear_spec = ModuleSpec(module=torch.nn.Linear)
    assert "no MoELayer" in message_of(balanced, linear_spec, config)


@on_megatron(1)
def test_other_routers_are_refused():
    from megatron.core.transformer.moe import moe_layer

    class OtherRouter(torch.nn.Module):
        def __init__(self, **options):
            super().__init__()

        def set_layer_number(self, number): ...

    def with_router(self, experts=None, shared_experts=None):
        self.experts, self.shared_experts, self.router = experts, shared_experts, OtherRouter

    with (
        patch.object(moe_layer.MoESubmodules, "__init__", with_router),
        pytest.raises(ConfigError, match=r"must be a TopKRouter.*got OtherRouter"),
    ):
        make_layer(settings(expert_model_parallel_size=1), {})


@on_megatron(1)
def test_layers_with_the_same_options_share_a_balancer():
    from ultraep.integrations.megatron import balanced_layers, balancers

    config = settings(expert_model_parallel_size=1)
    layers = [make_layer(config, {"slots": slots}) for slots in (1, 1, 2)]
    assert balanced_layers(layers) == layers
    assert [layer.layer_index for layer in layers] == [0, 1, 0]
    assert len(balancers(layers)) == 2
