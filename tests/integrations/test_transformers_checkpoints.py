"""Balanced models write the library's checkpoints; unsupported models are refused, unchanged."""

import copy
import io
import json
import math
from contextlib import ExitStack

import pytest
import torch

pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)


import torch.distributed as dist
import transformers
from equality import quiet
from families import FAMILIES, batch, build, outputs
from ranks import on_ranks
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.conversion_mapping import get_model_conversion_mapping

from ultraep import BalanceConfig, ConfigError
from ultraep.integrations.transformers import (
    balance,
    balanced_from_pretrained,
    balancers,
    unbalance,
)
from ultraep.integrations.transformers.load import home_state

# The library cannot load this text model by itself: its class has no configuration.
LOADABLE = sorted(FAMILIES.keys() - {"mistral_large4"})


def tensors_in(folder):
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def texts_in(folder):
    files = [path for path in folder.glob("*.json") if "index" not in path.name]
    return {path.name: json.loads(path.read_text()) for path in files}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


def round_trip(rank, group, folder, family, **sizes):
    """Save and load a balanced model; compare with the files and weights of the library."""
    plain, model = build(family, **sizes), build(family, **sizes)
    if rank == 0:
        plain.save_pretrained(folder / "plain")
    balance(model, group)
    model.save_pretrained(folder / "balanced", max_shard_size="60KB")
    again = balanced_from_pretrained(
        folder / "plain", group, attn_implementation="eager", dtype=torch.float32
    )
    assert type(again) is type(plain)
    assert_equal(again.state_dict(), model.state_dict())
    expected, saved, loaded = (outputs(m.eval(), batch(rank)) for m in (plain, model, again))
    assert torch.allclose(expected, saved, atol=1e-4)
    # The order of sums depends on the alignment of weights (2e-7 on AVX-512).
    assert torch.allclose(saved, loaded, rtol=1e-5, atol=1e-5)
    unbalance(model)
    unbalance(again)
    assert_equal(plain.state_dict(), again.state_dict())
    assert [type(m) for m in again.modules()] == [type(m) for m in plain.modules()]
    assert_equal(tensors_in(folder / "plain"), tensors_in(folder / "balanced"))
    assert texts_in(folder / "plain") == texts_in(folder / "balanced")
    assert len(list((folder / "balanced").glob("model-*.safetensors"))) > 1
    dist.barrier()


@pytest.mark.parametrize(
    ("families", "sizes"),
    [
        (["mixtral", "gpt_oss", "deepseek_v3"], {}),
        (["mixtral", "gpt_oss"], {"num_local_experts": 5}),  # uneven
        *(pytest.param(LOADABLE[i::2], {}, marks=pytest.mark.slow) for i in range(2)),
    ],
    ids=["some", "uneven", "first half", "second half"],
)
@on_ranks(2)
def test_families_are_saved_and_loaded(rank, group, families, sizes, tmp_path):
    with quiet():
        for family in families:
            round_trip(rank, group, tmp_path / family, family, **sizes)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@on_ranks(2)
def test_a_rank_reads_and_stores_only_its_home_experts(rank, group, family, tmp_path):
    with quiet(), ExitStack() as opened:
        model = build(family)
        whole = sum(p.numel() for p in model.parameters())
        if rank == 0:
            model.save_pretrained(tmp_path)
        balancer = balance(model, group)
        dist.barrier()
        files = [str(path) for path in tmp_path.glob("*.safetensors")]
        state = home_state(model, files, get_model_conversion_mapping(model), opened)
        sizes = [math.prod(stored.get_shape()) for stored in state.values()]
        balancer.close()
        dist.barrier()
    stored = sum(p.untyped_storage().nbytes() // p.itemsize for p in model.parameters())
    assert sum(sizes) == stored < whole


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
    balancer = balance(model, "alone", config=BalanceConfig(policy="none"))
    assert balancer.config.policy == "none"
    with pytest.raises(ConfigError, match="MixtralForCausalLM is already balanced"):
        balance(model)
    with pytest.raises(ConfigError, match=r"balanced model cannot be pickled.*save_pretrained\(\)"):
        torch.save(model, io.BytesIO())
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
