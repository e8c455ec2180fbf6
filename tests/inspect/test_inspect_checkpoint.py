"""A checkpoint that is read block by block routes like one that is loaded whole."""

import json
import shutil

import pytest
import torch
from inspect_models import routing_of, save_model

from ultraep.errors import BackendUnavailable, ConfigError, FileError
from ultraep.tools.inspect import library
from ultraep.tools.inspect.checkpoint import Checkpoint
from ultraep.tools.inspect.library import transformers
from ultraep.tools.inspect.windows import run_windows

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
load_file, save_file = safetensors.load_file, safetensors.save_file
CPU = torch.device("cpu")
IDS = torch.arange(5 * 24).reshape(5, 24) * 37 % 4000 + 3


def whole(folder):
    """By transformers alone: the ids of all layers. In float64, where rounding decides nothing."""
    model = transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")  # the others know no float64
    with routing_of(model) as found, torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    return found


def streamed(folder, sizes=(2, 2, 1)):
    opened = Checkpoint(folder, device=CPU, dtype=torch.float64)
    opened.model.set_experts_implementation("eager")
    with opened, routing_of(opened.model) as found:
        run_windows(
            opened.anatomy,
            IDS.split(sizes),
            opened.lend,
            lambda *_: None,
            [*opened.anatomy.blocks][-1],
        )
    return found


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "deepseek_v4", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe"]
)
def test_block_by_block_is_the_whole_model(family, tmp_path):
    save_model(family, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) >= 1
    expected, found = whole(tmp_path), streamed(tmp_path)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)


def test_the_language_part_of_a_model_that_sees(tmp_path):
    library = transformers()
    text = {"vocab_size": 4096, "hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    seeing = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    config = library.AutoConfig.for_model(
        "qwen3_vl_moe",
        text_config=text | {"num_experts": 8, "num_experts_per_tok": 2},
        vision_config=seeing | {"out_hidden_size": 64, "deepstack_visual_indexes": []},
    )
    torch.manual_seed(0)
    model = library.AutoModelForImageTextToText.from_config(config).double().eval()
    model.save_pretrained(tmp_path)
    model.set_experts_implementation("eager")
    with routing_of(model) as expected, torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    found = streamed(tmp_path)
    for layer in range(2):
        name = f"language_model.layers.{layer}.mlp.experts"
        assert torch.equal(found[name], expected[f"model.{name}"])


def test_weights_are_of_the_type_that_is_asked_for(checkpoint):
    for dtype, wanted in ((None, torch.float32), (torch.float16, torch.float16)):
        opened = Checkpoint(checkpoint, device=CPU, dtype=dtype)
        name, block = next(iter(opened.anatomy.blocks.items()))
        with opened, opened.lend(name):
            assert {parameter.dtype for parameter in block.parameters()} == {wanted}


def test_one_block_at_a_time_has_weights(checkpoint):
    opened = Checkpoint(checkpoint, device=CPU)
    blocks = opened.anatomy.blocks

    def filled():
        return [name for name, block in blocks.items() if not next(block.parameters()).is_meta]

    seen = []
    with opened:
        assert filled() == []
        run_windows(
            opened.anatomy,
            IDS.split([3, 2]),
            opened.lend,
            lambda name, number: seen.append((name, number, filled())),
            [*blocks][-1],
        )
    assert seen == [(name, number, [name]) for name in blocks for number in range(2)]
    assert filled() == []
    saved = [load_file(path) for path in checkpoint.glob("*.safetensors")]
    needed = {key: one[key].nbytes for one in saved for key in one if key != "lm_head.weight"}
    read = opened.bytes_to_read([*blocks])
    assert read == sum(needed.values())
    assert opened.bytes_in_memory() < read


def test_after_an_error_the_block_is_empty_again(checkpoint):
    opened = Checkpoint(checkpoint, device=CPU)
    name, block = next(iter(opened.anatomy.blocks.items()))

    def interrupted():
        with opened, opened.lend(name):
            assert not any(parameter.is_meta for parameter in block.parameters())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(parameter.is_meta for parameter in block.parameters())


# -- quantised weights ---------------------------------------------------------------------------


def rewrite(folder, change):
    """Every tensor of the files becomes what `change` makes of it, by name."""
    names = {}
    for path in folder.glob("*.safetensors"):
        tensors = {}
        for name, tensor in load_file(path).items():
            tensors |= change(name, tensor)
        save_file(tensors, path, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, path.name)
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def as_fp8(name, tensor):
    if not name.endswith("proj.weight"):
        return {name: tensor}
    blocks = [-(-side // 128) for side in tensor.shape]
    return {
        name: (tensor * 8).to(torch.float8_e4m3fn),
        name.replace("weight", "weight_scale_inv"): torch.full(blocks, 0.125),
    }


def as_mxfp4(name, tensor):
    """Random numbers of four bits, of some size."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: tensor}
    experts, inner, outer = tensor.shape
    drawn = torch.Generator().manual_seed(outer)
    shape = (experts, outer, inner // 32)
    return {
        f"{name}_blocks": torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=drawn),
        f"{name}_scales": torch.full(shape, 124, dtype=torch.uint8),
    }


def test_fp8_weights_are_plain_when_they_are_read(tmp_path):
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
    expected, found = whole(tmp_path / "plain"), streamed(folder)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_mxfp4_weights_are_plain_when_they_are_read(tmp_path):
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
    with opened:
        for name in opened.anatomy.blocks:
            with opened.lend(name):
                filled = {n: p for n, p in opened.model.named_parameters() if not p.is_meta}
            assert sum(key.startswith(f"{name}.") for key in filled) > 10
            assert {p.dtype for p in filled.values()} == {torch.float32}
            assert all(torch.equal(p, expected[n].to(p.dtype)) for n, p in filled.items())


# -- what is refused -----------------------------------------------------------------------------


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def one_file(folder):
    return sorted(folder.glob("*.safetensors"))[1]


def without_one_tensor(folder):
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        name = "model.layers.1.self_attn.q_proj.weight"
        if name in tensors:
            del tensors[name]
            save_file(tensors, path)


def with_a_renamed_expert(folder):
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        name = "model.layers.0.mlp.experts.3.gate_proj.weight"
        if name in tensors:
            save_file(tensors | {f"{name}_old": tensors.pop(name)}, path)


def with_other_shapes(folder):
    edit(folder, moe_intermediate_size=48)


BAD = {
    "no config": (lambda f: (f / "config.json").unlink(), FileError, "there is no config.json"),
    "cut config": (lambda f: (f / "config.json").write_text("{"), FileError, "config.json"),
    "unknown type": (lambda f: edit(f, model_type="alchemy"), FileError, "cannot read it: Val"),
    "no shard": (lambda f: one_file(f).unlink(), FileError, "no such file, but model"),
    "cut shard": (lambda f: one_file(f).write_bytes(b"12345"), FileError, "truncated or damaged"),
    "index": (
        lambda f: (f / "model.safetensors.index.json").write_text("[]"),
        FileError,
        "index.json: damaged",
    ),
    "no weights": (
        lambda f: [path.unlink() for path in f.glob("model*")],
        FileError,
        r"there is no file \*.safetensors",
    ),
    "missing tensor": (without_one_tensor, FileError, r"no weights for model.layers.1.self_attn.q"),
    "other shapes": (with_other_shapes, FileError, r"\[16, 128, 64\] there, not \[16, 128, 48\]"),
    "renamed expert": (with_a_renamed_expert, FileError, "is a tensor missing or renamed"),
    "wrong type": (lambda f: edit(f, hidden_size="x"), FileError, "expected int, got str"),
    "a zero": (lambda f: edit(f, head_dim=0), FileError, "cannot build this model: ZeroDiv"),
    "no dtype": (lambda f: edit(f, dtype=7), FileError, "dtype must be a floating-point type"),
    "many layers": (
        lambda f: edit(f, num_hidden_layers=10**9),
        FileError,
        "num_hidden_layers is 1000000000, but at most 1000",
    ),
    "large buffers": (lambda f: edit(f, head_dim=10**9), FileError, "needs buffers of"),
    "large header": (
        lambda f: one_file(f).write_bytes(b"\xff\xff\xff\x05" + bytes(4) + b"{" * 999),
        FileError,
        "claims a header of 100,663,295 bytes",
    ),
    "quantised": (
        lambda f: edit(f, quantization_config={"quant_method": "awq"}),
        ConfigError,
        "quantised by awq are not read here, only by fp8 and mxfp4",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_checkpoints_are_refused_in_one_line(name, checkpoint, tmp_path):
    damage, kind, words = BAD[name]
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    damage(folder)
    with pytest.raises(kind, match=words) as error:
        streamed(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "https://example.org/model", "nowhere"])
def test_names_of_a_hub_are_refused(name):
    with pytest.raises(ConfigError, match="nothing is downloaded"):
        Checkpoint(name, device=CPU)


def test_a_model_without_experts_is_refused_by_name(tmp_path):
    library = transformers()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = library.LlamaConfig(**sizes, num_attention_heads=2, vocab_size=64)
    library.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts of transformers'"):
        Checkpoint(tmp_path, device=CPU)


def test_without_the_library_there_is_a_hint(monkeypatch):
    monkeypatch.setattr(library, "import_module", lambda name: __import__("no_such_" + name))
    with pytest.raises(BackendUnavailable, match=r"pip install 'ultraep\[transformers\]'"):
        transformers()


def test_another_major_version_is_refused(monkeypatch):
    monkeypatch.setattr(transformers(), "__version__", "4.57.1")
    with pytest.raises(BackendUnavailable, match=r"needs transformers 5, this is 4\.57\.1"):
        transformers()
