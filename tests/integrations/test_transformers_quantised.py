"""Balanced models in FP8 and MXFP4 compute the bits of the unmodified models in the same format.

The library's own Python runs, with stand-ins for the kernels that it downloads (hub_kernels.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

import pytest

pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)

import torch
import torch.distributed as dist
import transformers.integrations.finegrained_fp8 as fp8
from equality import all_batches, assert_same_gradients, learn, quiet, under_torchrun
from families import batch, build, outputs
from hub_kernels import fp8_kernels, mxfp4_kernels
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config

from ultraep import ConfigError
from ultraep.bundle import as_bytes
from ultraep.integrations.transformers import (
    balance,
    balanced_experts,
    balanced_from_pretrained,
    balancers,
    unbalance,
)

OLD, NEW = version("transformers") < "5.22", version("transformers") >= "5.23"
SIZES = {"moe_intermediate_size": 32, "intermediate_size": 32}
DENSE = ["lm_head", "gate", "router"]


def fp8_config(**options: Any) -> Any:
    return FineGrainedFP8Config(
        **{"weight_block_size": (16, 16), "modules_to_not_convert": DENSE, **options}
    )


def load(kind: Any, folder: Any, experts: str = "grouped_mm", **options: Any) -> Any:
    return kind.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation=experts,
        **options,
    )


def saved(rank: int, folder: Any, family: str = "qwen3_moe", config: Any = None) -> Any:
    model = build(family, **SIZES)
    if rank == 0:
        model.save_pretrained(folder / "plain")
        quantised = load(type(model), folder / "plain", quantization_config=config or fp8_config())
        for name, parameter in quantised.named_parameters():
            if "activation_scale" in name:  # the library leaves them uninitialised
                scales = torch.linspace(0.01, 0.02, max(1, parameter.numel()))
                parameter.data = scales.view(parameter.shape)
        quantised.save_pretrained(folder / "fp8")
    dist.barrier()
    return type(model)


def assert_same_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    differ = [n for n in actual if not torch.equal(as_bytes(actual[n]), as_bytes(expected[n]))]
    assert differ == []


CASES = {  # options of `balance`, implementation
    "grouped": ({}, "grouped_mm"),
    "eager": ({}, "eager"),
    "batched": ({"slots": 2}, "batched_mm"),
    "two slots": ({"slots": 2}, "grouped_mm"),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_fp8_models_compute_the_same_bits(rank, group, case, tmp_path):
    options, experts = CASES[case]
    with quiet(), fp8_kernels():
        kind = saved(rank, tmp_path)
        plain, model = (load(kind, tmp_path / "fp8", experts).train() for _ in range(2))
        if experts == "batched_mm":  # these kernels have no backward
            plain, model = plain.requires_grad_(False), model.requires_grad_(False)
        run = learn if experts != "batched_mm" else lambda m, ids: [outputs(m, i) for i in ids]
        expected = run(plain, all_batches(group))[rank]
        balancer = balance(model, group, **options)
        (actual,) = run(model, [batch(rank)])
        assert torch.equal(actual, expected)
        if experts != "batched_mm":
            assert_same_gradients(model, plain)
        module = next(iter(balanced_experts(model).values()))
        assert {t.dtype.itemsize for t in module.bundle.values()} == {1, 4}
        assert not any(t.requires_grad or t.grad is not None for t in module.parameters())
        assert rank or balancer.stats()["copies"]
        balancer.close()


CONFIGS: dict[str, dict[str, Any]] = {"blocks": {}, "ue8m0 scales": {"scale_fmt": "ue8m0"}}
if not OLD:  # 5.17 cannot save them
    CONFIGS["static activation scales"] = {"activation_scheme": "static"}


@pytest.mark.parametrize(
    "config", [pytest.param(n, marks=[pytest.mark.slow] if n != "blocks" else []) for n in CONFIGS]
)
@on_ranks(2)
def test_fp8_checkpoints(rank, group, config, tmp_path):
    """Save and load in FP8; quantise while loading; unbalance."""
    experts = "eager" if "static" in config else "grouped_mm"
    with quiet(), fp8_kernels():
        settings = fp8_config(**CONFIGS[config])
        kind = saved(rank, tmp_path, config=settings)
        plain, model = (load(kind, tmp_path / "fp8", experts) for _ in range(2))
        expected = [outputs(plain, batch(r)) for r in range(2)][rank]
        balance(model, group)
        if rank == 0:
            plain.save_pretrained(tmp_path / "again")
        model.save_pretrained(tmp_path / "balanced", max_shard_size="60KB")
        read = partial(
            balanced_from_pretrained,
            group=group,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation=experts,
        )
        models = [model, read(tmp_path / "fp8")]
        if "static" not in config:
            models.append(read(tmp_path / "plain", quantization_config=settings))
        tokens = generated(plain, rank)
        for loaded in models:
            assert_same_bits(loaded.state_dict(), model.state_dict())
            assert torch.equal(outputs(loaded, batch(rank)), expected)
            assert torch.equal(generated(loaded, rank), tokens)
            assert rank or balancers(loaded)[0].stats()["copies"]
        for loaded in models:
            unbalance(loaded)
            assert_same_bits(loaded.state_dict(), plain.state_dict())
        folders = tmp_path / "balanced", tmp_path / "again"
        assert_same_bits(*map(tensors_in, folders))
        configs = [(folder / "config.json").read_text() for folder in folders]
        assert configs[0] == configs[1]
        dist.barrier()


def generated(model: Any, rank: int) -> torch.Tensor:
    return model.generate(batch(rank, rows=1), max_new_tokens=4, do_sample=False)


def tensors_in(folder: Any) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def fp4_experts(config: Any, seed: int) -> Any:
    config.expert_dtype = "fp4"  # 5.17 reads it there
    options = {} if OLD else {"expert_dtype": "fp4"}
    experts = fp8.FP8Experts(config, block_size=(16, 16), scale_fmt="ue8m0", **options)
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in experts.named_parameters():
        least, end = (118, 122) if "scale" in name else (0, 256)
        codes = torch.randint(least, end, parameter.shape, generator=draw, dtype=torch.uint8)
        parameter.data = codes.view(parameter.dtype)
    return experts


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@on_ranks(2)
def test_fp4_experts_of_fp8_models(rank, group, experts, tmp_path):
    with quiet(), fp8_kernels(), torch.no_grad():
        kind = saved(rank, tmp_path)
        plain, model = (load(kind, tmp_path / "fp8", experts) for _ in range(2))
        for each in (plain, model):
            for number, layer in enumerate(each.model.layers):
                layer.mlp.experts = fp4_experts(each.config, number)
        expected = [outputs(plain, batch(r)) for r in range(2)][rank]
        balancer = balance(model, group)
        assert torch.equal(outputs(model, batch(rank)), expected)
        assert rank or balancer.stats()["copies"]
        unbalance(model)
        assert_same_bits(model.state_dict(), plain.state_dict())


@contextmanager
def natively(plain: Any) -> Iterator[Any]:
    """Balance the library's own expert parallelism; yield the style, and a configuration of it.

    Ranks have the same batch; FSDP2 refuses FP8 parameters, so there is tensor parallelism.
    """
    from transformers.distributed import DistributedConfig

    from ultraep.integrations.transformers import enable

    style = enable(slots=1)
    try:
        replicated = dict.fromkeys(plain.tp_plan, "replicate")
        yield style, DistributedConfig(tp_size=2, tp_plan=replicated, ep_size=2)
    finally:
        style.disable()


@pytest.mark.skipif(OLD, reason="enable() needs transformers 5.22")
@on_ranks(2)
def test_the_library_s_own_expert_parallelism_in_fp8(rank, group, tmp_path):
    with under_torchrun(rank, 2), fp8_kernels():
        kind = saved(rank, tmp_path)
        plain = load(kind, tmp_path / "fp8").train()
        (expected,) = learn(plain, [batch(0)])
        with natively(plain) as (style, config):
            model = load(kind, tmp_path / "fp8", distributed_config=config).train()
        (actual,) = learn(model, [batch(0)])
        assert torch.equal(actual, expected)
        gradients = (m.model.embed_tokens.weight.grad for m in (model, plain))
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
        assert sum(b.stats()["copies"] for b in style.balancers.values())
        for balancer in style.balancers.values():
            balancer.close()


def saved_mxfp4(rank: int, folder: Any) -> Any:
    model = build("gpt_oss", intermediate_size=64)
    if rank == 0:
        model.config.quantization_config = {"quant_method": "mxfp4"}
        model.save_pretrained(folder)
        state = load_file(folder / "model.safetensors")
        draw = torch.Generator().manual_seed(3)
        for name in [n for n in state if n.endswith("_proj") and ".experts." in n]:
            experts, columns, rows = state.pop(name).shape
            shape = experts, rows, columns // 32
            for end, kind, least, most in (("blocks", (16,), 0, 256), ("scales", (), 121, 125)):
                state[f"{name}_{end}"] = torch.randint(
                    least, most, (*shape, *kind), generator=draw, dtype=torch.uint8
                )
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    return type(model)


@on_ranks(3)
def test_mxfp4_models_compute_the_same_bits(rank, group, tmp_path):
    with quiet(), mxfp4_kernels(), torch.no_grad():
        kind = saved_mxfp4(rank, tmp_path)
        plain, model = (load(kind, tmp_path) for _ in range(2))
        expected = [outputs(plain, batch(r)) for r in range(3)][rank]
        balancer = balance(model, group, slots=2)
        assert torch.equal(outputs(model, batch(rank)), expected)
        module = next(iter(balanced_experts(model).values()))
        for name in ("down_proj", "gate_up_proj_scales"):
            assert module.bundle[name].dtype == torch.uint8
            assert len(module.bundle[name]) == len(module.home_experts)
        assert rank or balancer.stats()["copies"]
        unbalance(model)
        assert torch.equal(outputs(model, batch(rank)), expected)


@on_ranks(2)
def test_mxfp4_checkpoints(rank, group, tmp_path):
    with quiet(), mxfp4_kernels(), torch.no_grad():
        kind = saved_mxfp4(rank, tmp_path)
        plain = load(kind, tmp_path)
        expected = [outputs(plain, batch(r)) for r in range(2)][rank]
        model = balanced_from_pretrained(
            tmp_path, group, dtype=torch.float32, attn_implementation="eager"
        )
        assert torch.equal(outputs(model, batch(rank)), expected)
        model.save_pretrained(tmp_path / "balanced")
        files = [load_file(f / "model.safetensors") for f in (tmp_path / "balanced", tmp_path)]
        assert_same_bits(*files)
        assert torch.equal(generated(model, rank), generated(plain, rank))
        unbalance(model)
        assert torch.equal(outputs(model, batch(rank)), expected)
        dist.barrier()


@pytest.mark.skipif(not NEW, reason="transformers 5.22 has no expert parallelism for MXFP4")
@on_ranks(2)
def test_the_library_s_own_expert_parallelism_in_mxfp4(rank, group, tmp_path):
    with under_torchrun(rank, 2), quiet(), mxfp4_kernels(), torch.no_grad():
        kind = saved_mxfp4(rank, tmp_path)
        plain = load(kind, tmp_path)
        expected = outputs(plain, batch(0))
        with natively(plain) as (style, config):
            model = load(kind, tmp_path, distributed_config=config)
        assert torch.equal(outputs(model, batch(0)), expected)
        for balancer in style.balancers.values():
            assert balancer.stats()["copies"]
            balancer.close()


def fp8_model(folder: Any, experts: str = "grouped_mm", **options: Any) -> Any:
    model = build("qwen3_moe", **SIZES)
    model.save_pretrained(folder)
    with fp8_kernels():
        return load(type(model), folder, experts, quantization_config=fp8_config(**options))


@pytest.mark.parametrize(
    ("experts", "options", "reason"),
    [
        ("deepgemm_megamoe", {}, "sends rows between ranks itself"),
        ("grouped_mm", {"activation_scheme": "static"}, "'grouped_mm' of the library does not"),
    ],
)
def test_implementations_that_cannot_be_used(experts, options, reason, tmp_path):
    with quiet():
        model = fp8_model(tmp_path, "eager", **options)
        model.config._experts_implementation = experts
        with pytest.raises(ConfigError, match=reason):
            balance(model, "alone")


def test_other_quantisers_are_named():
    model = build("mixtral")
    model.quantization_method = "torchao"
    weight = model.model.layers[0].mlp.experts.down_proj
    model.model.layers[0].mlp.experts.down_proj = torch.nn.Parameter(
        weight.detach().to(torch.int8), requires_grad=False
    )
    with pytest.raises(ConfigError, match=r"is quantised by torchao .*use FineGrainedFP8Config"):
        balance(model, "alone")
    for layer in model.model.layers:
        layer.mlp.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    model.quantization_method = "gptq"
    with pytest.raises(ConfigError, match="quantised by gptq, and FineGrainedFP8Config and Mxfp4"):
        balance(model, "alone")


def test_a_quantiser_that_leaves_the_experts_alone(tmp_path):
    model = build("mixtral")
    model.quantization_method = "bitsandbytes"
    expected = outputs(model, batch(0))
    balance(model, "alone")
    torch.testing.assert_close(outputs(model, batch(0)), expected)
    with pytest.raises(ConfigError, match=r"quantised by bitsandbytes .* call unbalance first"):
        model.save_pretrained(tmp_path)
    unbalance(model)
