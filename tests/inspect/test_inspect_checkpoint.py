"""Checkpoints: dequantised, larger than memory, damaged, and unsupported ones."""

import json
import shutil
from functools import partial

import pytest
import torch
from inspect_models import routing_of, save_model

from ultraep.errors import ConfigError, FileError
from ultraep_tools.inspect.library import transformers
from ultraep_tools.inspect.model import InspectedModel
from ultraep_tools.inspect.options import InspectOptions

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
load_file, save_file = safetensors.load_file, safetensors.save_file
INDEX = "model.safetensors.index.json"
IDS = torch.arange(5 * 24).reshape(5, 24) * 37 % 4000 + 3


def choices(model):
    with routing_of(model) as routing, torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    return routing


def whole(folder, **options):
    load = transformers().AutoModelForCausalLM.from_pretrained
    return choices(load(folder, **options).eval())


def inspected(folder):
    with InspectedModel(InspectOptions(model=folder, device="cpu")).loaded() as model:
        return choices(model)


def assert_same(routing, expected):
    assert routing.keys() == expected.keys()
    assert all(torch.equal(routing[name], expected[name]) for name in expected)


def test_a_model_that_does_not_fit_into_memory_is_read_from_disk(checkpoint, monkeypatch):
    expected, auto = whole(checkpoint), transformers().AutoModelForCausalLM
    load = partial(auto.from_pretrained, max_memory={"cpu": 3_000_000})
    monkeypatch.setattr(auto, "from_pretrained", load)
    with InspectedModel(InspectOptions(model=checkpoint)).loaded() as model:
        assert "disk" in model.hf_device_map.values()
        assert_same(choices(model), expected)


def rewrite(folder, change):
    names = {}
    for path in folder.glob("*.safetensors"):
        tensors = {}
        for name, tensor in load_file(path).items():
            tensors |= change(name, tensor)
        save_file(tensors, path, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, path.name)
    index = {"metadata": {}, "weight_map": names}
    (folder / INDEX).write_text(json.dumps(index))


def as_fp8(name, tensor):
    if not name.endswith("proj.weight"):
        return {name: tensor}
    blocks = [-(-side // 128) for side in tensor.shape]
    return {
        name: (tensor * 8).to(torch.float8_e4m3fn),
        name.replace("weight", "weight_scale_inv"): torch.full(blocks, 0.125),
    }


def as_mxfp4(name, tensor):
    """Random MXFP4 numbers."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: tensor}
    experts, inner, outer = tensor.shape
    drawn = torch.Generator().manual_seed(outer)
    shape = (experts, outer, inner // 32)
    return {
        f"{name}_blocks": torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=drawn),
        f"{name}_scales": torch.full(shape, 124, dtype=torch.uint8),
    }


def test_fp8_weights_are_dequantised(tmp_path):
    save_model("qwen3_moe", tmp_path / "plain")
    folder = shutil.copytree(tmp_path / "plain", tmp_path / "fp8")
    rewrite(folder, as_fp8)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit(folder, quantization_config=settings | {"activation_scheme": "dynamic"})
    rewrite(
        tmp_path / "plain",
        lambda name, tensor: {
            name: (tensor * 8).to(torch.float8_e4m3fn).float() / 8 if "proj." in name else tensor
        },
    )
    assert_same(inspected(folder), whole(tmp_path / "plain"))


def test_mxfp4_weights_are_dequantised(tmp_path):
    save_model("gpt_oss", tmp_path)
    rewrite(tmp_path, lambda name, tensor: as_mxfp4(name, tensor.bfloat16()))
    kept = ["lm_head", "router", "self_attn", "embed_tokens"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    edit(tmp_path, quantization_config=settings, dtype="bfloat16")
    plain = transformers().Mxfp4Config(dequantize=True)
    assert_same(inspected(tmp_path), whole(tmp_path, quantization_config=plain))
    with pytest.raises(ConfigError, match="computed in the saved dtype; remove --dtype"):
        InspectedModel(InspectOptions(model=tmp_path, dtype="float32"))


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def second_file(folder):
    return sorted(folder.glob("*.safetensors"))[1]


def drop_tensor(folder):
    dropped = "model.layers.1.self_attn.q_proj.weight"
    rewrite(folder, lambda name, tensor: {} if name == dropped else {name: tensor})


DAMAGE = {
    "no config": (lambda f: (f / "config.json").unlink(), "there is no config.json"),
    "cut config": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "no shard": (lambda f: second_file(f).unlink(), "No such file or directory"),
    "cut shard": (lambda f: second_file(f).write_bytes(b"12345"), "header too small"),
    "missing tensor": (drop_tensor, r"no weights for model.layers.1.self_attn.q"),
    "other shapes": (
        lambda f: edit(f, moe_intermediate_size=48),
        r"\[16, 128, 64\] in the files, the model needs \[16, 128, 48\]",
    ),
    "a zero": (lambda f: edit(f, head_dim=0), "cannot build this model: ZeroDiv"),
    "many layers": (
        lambda f: edit(f, num_hidden_layers=10**9),
        "num_hidden_layers is 1000000000, the limit is 1000",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoints_are_refused_in_one_line(name, checkpoint, tmp_path):
    damage, message = DAMAGE[name]
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    damage(folder)
    with pytest.raises(FileError, match=message) as error:
        inspected(folder)
    assert "\n" not in str(error.value)


def test_unsupported_models_are_refused(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "awq")
    edit(folder, quantization_config={"quant_method": "awq"})
    with pytest.raises(ConfigError, match="quantised by awq cannot be read, only fp8 and mxfp4"):
        inspected(folder)
    library = transformers()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = library.LlamaConfig(**sizes, num_attention_heads=2, vocab_size=64)
    library.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts of transformers'"):
        inspected(tmp_path / "dense")
