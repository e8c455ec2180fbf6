"""What cannot be balanced is refused when a model is built, before anything is allocated."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from megatron_models import make_layer, on_ranks, settings
from ranks import shared_pool


def refused(build, *args, **options):
    """What was said; no parameter was made, and no balancer."""
    from ultraep import ConfigError
    from ultraep.integrations import common

    with (
        patch.object(torch.nn.Parameter, "__new__", side_effect=AssertionError("allocated")),
        patch.object(common, "Balancer", side_effect=AssertionError("joined")),
        pytest.raises(ConfigError) as said,
    ):
        build(*args, **options)
    return str(said.value)


@on_ranks
def build_all():
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
    return said


def test_it_is_refused_by_name():
    for said in shared_pool().run(1, build_all, {}):
        for name, message in said.items():
            assert name.partition(",")[0] in message, (name, message)


@on_ranks
def other_routers():
    from megatron.core.transformer.moe import moe_layer

    class Mine(torch.nn.Module):
        def __init__(self, **options):
            super().__init__()

        def set_layer_number(self, number): ...

    from ultraep import ConfigError

    with (
        patch.object(moe_layer.MoESubmodules, "__init__", _with_router(moe_layer, Mine)),
        pytest.raises(ConfigError, match="choices of Mine are not known"),
    ):
        make_layer(settings(expert_model_parallel_size=1), {})


def _with_router(moe_layer, router):
    def made(self, experts=None, shared_experts=None):
        self.experts, self.shared_experts, self.router = experts, shared_experts, router

    return made


def test_other_routers_are_refused():
    shared_pool().run(1, other_routers, {})


@on_ranks
def layers_share():
    from ultraep.integrations.megatron import balanced_layers, balancers

    config = settings(expert_model_parallel_size=1)
    alike = [make_layer(config, {"slots": 1}) for _ in range(2)]
    other = make_layer(config, {"slots": 2})
    found = balancers([*alike, other])
    assert balanced_layers(alike) == alike
    return [layer.layer_index for layer in (*alike, other)], len(found)


def test_layers_with_the_same_options_share_a_balancer():
    assert shared_pool().run(1, layers_share, {}) == [([0, 1, 0], 2)]
