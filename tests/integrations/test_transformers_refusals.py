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
from ultraep.integrations.transformers import balance, balancers, unbalance

TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
LLAMA_4 = {"num_local_experts": 2, "intermediate_size_mlp": 16, "head_dim": 8}


def changed(change):
    """Return a Mixtral after a change of the experts of its two layers."""
    model = build("mixtral")
    change(*(layer.mlp for layer in model.model.layers))
    return model


def quantise(_, mlp):
    for name in ("gate_up_proj", "down_proj"):
        stored = getattr(mlp.experts, name).detach().to(torch.float8_e4m3fn)
        setattr(mlp.experts, name, torch.nn.Parameter(stored, requires_grad=False))


def tie(first, second):
    second.experts.down_proj = first.experts.down_proj


def share(first, second):
    second.experts = first.experts


MODELS = {
    "LlamaForCausalLM has no experts in the registry .* it has no experts": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    ),
    "Llama4TextExperts cannot be balanced": (
        lambda: transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**TINY, **LLAMA_4))
    ),
    r"layers.1.mlp.experts.gate_up_proj' is quantised .*float8_e4m3fn.* scales": (
        lambda: changed(quantise)
    ),
    r"layers.0.mlp.experts.down_proj' and .*layers.1.mlp.experts.down_proj' are tied": (
        lambda: changed(tie)
    ),
    r"layers.0.mlp.experts.gate_up_proj' and .*layers.1.mlp.*' are tied": lambda: changed(share),
}
OPTIONS = {
    "slots must lie between 0 and 8, got 9": {"slots": 9},
    "slots must lie between 0 and 8, got -1": {"slots": -1},
    "nonsense": {"policy": "nonsense"},
    "must be an initialised process group": {"group": object()},
}


@pytest.mark.parametrize("match", [*MODELS, *OPTIONS])
def test_models_and_settings_are_refused_and_the_model_is_unchanged(match):
    model = MODELS.get(match, lambda: build("mixtral"))()
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    classes, own = [type(m) for m in model.modules()], set(vars(model))
    with pytest.raises(ConfigError, match=match):
        balance(model, **OPTIONS.get(match, {}))
    assert [type(m) for m in model.modules()] == classes
    assert set(vars(model)) == own
    for name, parameter in model.named_parameters():
        identity, value = before[name]
        assert id(parameter) == identity
        assert torch.equal(parameter.detach().float(), value.float())


def test_a_balanced_model():
    model = build("mixtral")
    balancer = balance(model, "alone")
    with pytest.raises(ConfigError, match="MixtralForCausalLM is already balanced"):
        balance(model)
    assert balancers(model) == [balancer]
    unbalance(model)
    with pytest.raises(ConfigError, match="MixtralForCausalLM is not balanced"):
        unbalance(model)


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
