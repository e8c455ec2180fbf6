"""Unsupported models are refused by name and stay unchanged."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)

import transformers
from families import batch, build, outputs
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ultraep import ConfigError
from ultraep.integrations.transformers import (
    balance,
    balancers,
    unbalance,
)

TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def refused(model, match, **options):
    """Assert that `balance` raises and that the model is unchanged."""
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    classes, own = [type(m) for m in model.modules()], set(vars(model))
    with pytest.raises(ConfigError, match=match):
        balance(model, **options)
    assert [type(m) for m in model.modules()] == classes
    assert set(vars(model)) == own
    for name, parameter in model.named_parameters():
        identity, value = before[name]
        assert id(parameter) == identity
        assert torch.equal(parameter.detach().float(), value.float())


def test_a_model_without_experts():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    refused(model, "LlamaForCausalLM has no experts in the registry .* it has no experts")


def test_experts_that_are_not_in_the_registry():
    config = transformers.Llama4TextConfig(
        **TINY, num_local_experts=2, intermediate_size_mlp=16, head_dim=8
    )
    refused(transformers.Llama4ForCausalLM(config), "Llama4TextExperts cannot be balanced")


def test_a_balanced_model():
    model = build("mixtral")
    balancer = balance(model, "alone")
    with pytest.raises(ConfigError, match="MixtralForCausalLM is already balanced"):
        balance(model)
    assert balancers(model) == [balancer]
    unbalance(model)
    with pytest.raises(ConfigError, match="MixtralForCausalLM is not balanced"):
        unbalance(model)


def test_quantised_experts():
    model = build("mixtral")
    experts = model.model.layers[1].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        stored = getattr(experts, name).detach().to(torch.float8_e4m3fn)
        setattr(experts, name, torch.nn.Parameter(stored, requires_grad=False))
    refused(model, r"layers.1.mlp.experts.gate_up_proj' is quantised .*float8_e4m3fn.* scales")


def test_tied_experts():
    model = build("mixtral")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj = first.down_proj
    refused(
        model, r"layers.0.mlp.experts.down_proj' and .*layers.1.mlp.experts.down_proj' are tied"
    )
    model = build("mixtral")
    model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
    refused(model, r"layers.0.mlp.experts.gate_up_proj' and .*layers.1.mlp.*' are tied")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"slots": 9}, "slots must lie between 0 and 8, got 9"),
        ({"slots": -1}, "slots must lie between 0 and 8, got -1"),
        ({"policy": "nonsense"}, "nonsense"),
        ({"group": object()}, "must be an initialised process group"),
    ],
)
def test_invalid_settings(options, match):
    refused(build("mixtral"), match, **options)


@on_ranks(2)
def test_sharded_experts(rank, group):
    model = fully_shard(build("mixtral"), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ConfigError, match=r"ranks \[0, 1\]; balance the model before sharding it"):
        balance(model)


def test_saving_refuses_options_that_change_the_weights(tmp_path):
    model = build("mixtral")
    balance(model, "alone")
    with pytest.raises(ConfigError, match="does not support state_dict"):
        model.save_pretrained(tmp_path, state_dict=model.state_dict())
    with pytest.raises(ConfigError, match="max_shard_size"):
        model.save_pretrained(tmp_path, max_shard_size="5 apples")
    assert not list(tmp_path.iterdir())
    unbalance(model)


def test_a_copied_model_has_its_own_weights():
    model = build("mixtral").eval()
    balance(model, "alone")
    other = copy.deepcopy(model)
    ids = batch(0)
    torch.testing.assert_close(outputs(model, ids), outputs(other, ids), rtol=1e-5, atol=1e-5)
    assert other.save_pretrained.__self__ is other
    with torch.no_grad():
        other.model.layers[0].mlp.experts.down_proj.zero_()
    assert not torch.allclose(outputs(model, ids), outputs(other, ids), rtol=1e-3, atol=1e-3)
    unbalance(model)
