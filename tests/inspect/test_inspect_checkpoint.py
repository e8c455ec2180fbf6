"""A checkpoint read block by block routes like a model that is loaded whole."""

import json
import shutil

import pytest
import torch
from inspect_models import routing_of, save_model

from ultraep.errors import ConfigError, FileError
from ultraep_tools.inspect.blocks import run_windows
from ultraep_tools.inspect.checkpoint import INDEX, Checkpoint
from ultraep_tools.inspect.library import transformers

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
load_file, save_file = safetensors.load_file, safetensors.save_file
CPU = torch.device("cpu")
IDS = torch.arange(5 * 24).reshape(5, 24) * 37 % 4000 + 3


def whole(folder):
    model = transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")  # supports float64
    with routing_of(model) as routing, torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    return routing


def run(opened, sizes=(2, 2, 1), before_block=lambda *_: None):
    last = [*opened.anatomy.blocks][-1]
    run_windows(opened.anatomy, IDS.split(sizes), opened.loaded, before_block, last)


def streamed(folder):
    opened = Checkpoint(folder, device=CPU, dtype=torch.float64)
    opened.model.set_experts_implementation("eager")
    with routing_of(opened.model) as routing:
        run(opened)
    return routing


def assert_same(routing, expected):
    assert routing.keys() == expected.keys()
    assert all(torch.equal(routing[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "deepseek_v4", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe"]
)
def test_block_by_block_equals_the_whole_model(family, tmp_path):
    save_model(family, tmp_path)
    assert_same(streamed(tmp_path), whole(tmp_path))


def test_one_block_at_a_time_has_weights(checkpoint):
    opened = Checkpoint(checkpoint, device=CPU)
    blocks = opened.anatomy.blocks

    def filled():
        return [name for name, block in blocks.items() if not next(block.parameters()).is_meta]

    calls = []
    run(opened, [3, 2], lambda name, number: calls.append((name, number, filled())))
    assert calls == [(name, number, [name]) for name in blocks for number in range(2)]
    assert filled() == []
    assert opened.nbytes == sum(p.stat().st_size for p in checkpoint.glob("*.safetensors"))


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
    assert_same(streamed(folder), whole(tmp_path / "plain"))


def test_mxfp4_weights_are_dequantised(tmp_path):
    save_model("gpt_oss", tmp_path)
    rewrite(tmp_path, as_mxfp4)
    kept = ["lm_head", "router", "self_attn", "embed_tokens"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    edit(tmp_path, quantization_config=settings)
    library = transformers()
    plain = {"quantization_config": library.Mxfp4Config(dequantize=True), "dtype": torch.float32}
    model = library.AutoModelForCausalLM.from_pretrained(tmp_path, **plain).eval()
    expected = dict(model.named_parameters())
    opened = Checkpoint(tmp_path, device=CPU, dtype=torch.float32)
    for name in ("", *opened.anatomy.blocks):
        with opened.loaded(name):
            filled = {n: p for n, p in opened.model.named_parameters() if not p.is_meta}
        assert len(filled) > (10 if name else 1)
        assert {p.dtype for p in filled.values()} == {torch.float32}
        assert all(torch.equal(p, expected[n].to(p.dtype)) for n, p in filled.items())


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def second_file(folder):
    return sorted(folder.glob("*.safetensors"))[1]


def drop_tensor(folder):
    dropped = "model.layers.1.self_attn.q_proj.weight"
    rewrite(folder, lambda name, tensor: {} if name == dropped else {name: tensor})


def rename_expert(folder):
    renamed = "model.layers.0.mlp.experts.3.gate_proj.weight"
    rewrite(folder, lambda name, tensor: {name + "_old" * (name == renamed): tensor})


DAMAGE = {
    "no config": (lambda f: (f / "config.json").unlink(), "there is no config.json"),
    "cut config": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "unknown type": (lambda f: edit(f, model_type="alchemy"), "cannot read it: Val"),
    "no shard": (lambda f: second_file(f).unlink(), "no such file, but model"),
    "cut shard": (lambda f: second_file(f).write_bytes(b"12345"), "truncated or damaged"),
    "index": (
        lambda f: (f / "model.safetensors.index.json").write_text("[]"),
        "index.json: damage",
    ),
    "no weights": (lambda f: [p.unlink() for p in f.glob("model*")], r"no file \*.safetensors"),
    "missing tensor": (drop_tensor, r"no weights for model.layers.1.self_attn.q"),
    "other shapes": (
        lambda f: edit(f, moe_intermediate_size=48),
        r"\[16, 128, 64\] in the files, the model needs \[16, 128, 48\]",
    ),
    "renamed expert": (rename_expert, "is a tensor missing or renamed"),
    "wrong type": (lambda f: edit(f, hidden_size="x"), "expected int, got str"),
    "a zero": (lambda f: edit(f, head_dim=0), "cannot build this model: ZeroDiv"),
    "no dtype": (lambda f: edit(f, dtype=7), "dtype must be a floating-point type"),
    "many layers": (
        lambda f: edit(f, num_hidden_layers=10**9),
        "num_hidden_layers is 1000000000, the limit is 1000",
    ),
    "large buffers": (lambda f: edit(f, head_dim=10**9), "needs buffers of"),
    "large header": (
        lambda f: second_file(f).write_bytes(b"\xff\xff\xff\x05" + bytes(4) + b"{" * 999),
        "the header claims 100,663,295 bytes",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoints_are_refused_in_one_line(name, checkpoint, tmp_path):
    damage, message = DAMAGE[name]
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    damage(folder)
    with pytest.raises(FileError, match=message) as error:
        streamed(folder)
    assert "\n" not in str(error.value)


def test_unsupported_models_are_refused(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "awq")
    edit(folder, quantization_config={"quant_method": "awq"})
    with pytest.raises(ConfigError, match="quantised by awq cannot be read, only fp8 and mxfp4"):
        Checkpoint(folder, device=CPU)
    library = transformers()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = library.LlamaConfig(**sizes, num_attention_heads=2, vocab_size=64)
    library.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts of transformers'"):
        Checkpoint(tmp_path / "dense", device=CPU)
