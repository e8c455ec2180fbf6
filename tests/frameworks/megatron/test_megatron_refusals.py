"""What cannot be balanced is refused when a model is built, before anything is allocated."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from megatron_models import make_layer, on_megatron, settings

from ultraep import ConfigError


def refused(build, *args, **options):
    """What was said; no parameter was made, and no balancer."""
    from ultraep.integrations import common

    with (
        patch.object(torch.nn.Parameter, "__new__", side_effect=AssertionError("allocated")),
        patch.object(common, "Balancer", side_effect=AssertionError("joined")),
        pytest.raises(ConfigError) as said,
    ):
        build(*args, **options)
    return str(said.value)


@on_megatron(1)
def test_it_is_refused_by_name():
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    from ultraep.integrations.megatron import BalancedMoELayer, balanced

    config = settings()
    linear = MLPSubmodules(linear_fc1=torch.nn.Linear, linear_fc2=torch.nn.Linear)
    others = {
        "TEGroupedMLP": ModuleSpec(module=TEGroupedMLP, submodules=linear),
        "Linear": ModuleSpec(module=SequentialMLP, submodules=linear),
        "Identity": torch.nn.Identity,
    }
    said = {
        name: refused(BalancedMoELayer, config, MoESubmodules(experts=experts))
        for name, experts in others.items()
    }
    spec = get_moe_module_spec(use_te=False, num_experts=8)
    for changes in ({"moe_token_dispatcher_type": "flex"}, {"expert_tensor_parallel_size": 2}):
        bad = SimpleNamespace(**(vars(config) | changes))
        (name,) = changes
        said[name] = refused(balanced, spec, bad)
        said[f"{name}, built"] = refused(BalancedMoELayer, bad, spec.submodules)
    said["homes"] = refused(balanced, spec, config, homes=[0])
    said["no MoELayer"] = refused(balanced, ModuleSpec(module=torch.nn.Linear), config)
    for name, message in said.items():
        assert name.partition(",")[0] in message, (name, message)


@on_megatron(1)
def test_other_routers_are_refused():
    from megatron.core.transformer.moe import moe_layer

    class Mine(torch.nn.Module):
        def __init__(self, **options):
            super().__init__()

        def set_layer_number(self, number): ...

    def with_router(self, experts=None, shared_experts=None):
        self.experts, self.shared_experts, self.router = experts, shared_experts, Mine

    with (
        patch.object(moe_layer.MoESubmodules, "__init__", with_router),
        pytest.raises(ConfigError, match=r"must be a TopKRouter.*got Mine"),
    ):
        make_layer(settings(expert_model_parallel_size=1), {})


@on_megatron(1)
def test_layers_with_the_same_options_share_a_balancer():
    from ultraep.integrations.megatron import balanced_layers, balancers

    config = settings(expert_model_parallel_size=1)
    alike = [make_layer(config, {"slots": 1}) for _ in range(2)]
    other = make_layer(config, {"slots": 2})
    assert balanced_layers(alike) == alike
    assert [layer.layer_index for layer in (*alike, other)] == [0, 1, 0]
    assert len(balancers([*alike, other])) == 2
