"""Balanced models in FP8 and MXFP4 compute the bits of the unmodified models in the same format.

The library's own Python runs, with stand-ins for the kernels that it downloads (hub_kernels.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)

import torch
import torch.distributed as dist
from equality import all_batches, assert_same_gradients, learn, quiet
from families import batch, build, outputs
from hub_kernels import fp8_kernels
from ranks import on_ranks
from safetensors.torch import load_file
from shared_peers import SharedPeers
from transformers import FineGrainedFP8Config

from ultraep import ConfigError, PlanMismatch
from ultraep.backends.triton.device import interpreted
from ultraep.bundle import as_bytes
from ultraep.integrations.transformers import (
    balance,
    balanced_experts,
    balanced_from_pretrained,
    balancers,
    unbalance,
)

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
    """Save a tiny model, and the same model in FP8; return its class."""
    model = build(family, **SIZES)
    if rank == 0:
        model.save_pretrained(folder / "plain")
        quantised = load(type(model), folder / "plain", quantization_config=config or fp8_config())
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
        expected = learn(plain, all_batches(group))[rank]
        balancer = balance(model, group, **options)
        (actual,) = learn(model, [batch(rank)])
        assert torch.equal(actual, expected)
        assert_same_gradients(model, plain)
        module = next(iter(balanced_experts(model).values()))
        assert {t.dtype.itemsize for t in module.bundle.values()} == {1, 4}
        assert not any(t.requires_grad or t.grad is not None for t in module.parameters())
        assert rank or balancer.stats()["copies"]
        balancer.close()


@on_ranks(3)
def test_fp8_models_on_uneven_ranks_and_without_balancing(rank, group, tmp_path):
    with quiet(), fp8_kernels():
        kind = saved(rank, tmp_path, "mixtral")
        plain, model = (load(kind, tmp_path / "fp8") for _ in range(2))
        expected = [outputs(plain, batch(r)) for r in range(3)][rank]
        balancer = balance(model, group, policy="none")
        assert torch.equal(outputs(model, batch(rank)), expected)
        unbalance(model)
        balancer = balance(model, group)
        assert torch.equal(outputs(model, batch(rank)), expected)
        assert rank or balancer.stats()["copies"]
        unbalance(model)
        assert_same_bits(model.state_dict(), plain.state_dict())


@pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
@on_ranks(2)
def test_fp8_models_on_the_mapped_plane(rank, group, tmp_path):
    with quiet(), fp8_kernels():
        kind = saved(rank, tmp_path)
        plain, model = (load(kind, tmp_path / "fp8") for _ in range(2))
        expected = [outputs(plain, batch(r)) for r in range(2)][rank]
        balancer = balance(model, group, data_plane="mapped", peers=SharedPeers(group), slots=2)
        assert torch.equal(outputs(model, batch(rank)), expected)
        assert balancer.stats()["copies"]
        balancer.close()


CONFIGS = {
    "blocks": {},
    "static activation scales": {"activation_scheme": "static"},
    "ue8m0 scales": {"scale_fmt": "ue8m0"},
}


@pytest.mark.parametrize("config", CONFIGS)
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
        model.save_pretrained(tmp_path / "balanced", max_shard_size="60KB")
        options = {
            "dtype": torch.float32,
            "attn_implementation": "eager",
            "experts_implementation": experts,
        }
        again = balanced_from_pretrained(tmp_path / "fp8", group, **options)
        anew = balanced_from_pretrained(
            tmp_path / "plain", group, quantization_config=settings, **options
        )
        for loaded in (model, again, anew):
            assert torch.equal(outputs(loaded, batch(rank)), expected)
            assert_same_bits(loaded.state_dict(), model.state_dict())
            assert rank or balancers(loaded)[0].stats()["copies"]
        for loaded in (model, again, anew):
            unbalance(loaded)
            assert_same_bits(loaded.state_dict(), plain.state_dict())
        files = [
            {
                n: t
                for f in (tmp_path / folder).glob("*.safetensors")
                for n, t in load_file(f).items()
            }
            for folder in ("balanced", "fp8")
        ]
        assert_same_bits(*files)
        configs = [
            (tmp_path / folder / "config.json").read_text() for folder in ("balanced", "fp8")
        ]
        assert configs[0] == configs[1]
        dist.barrier()


@on_ranks(2)
def test_fp8_models_generate_the_same_tokens(rank, group, tmp_path):
    with quiet(), fp8_kernels():
        kind = saved(rank, tmp_path)
        plain, model = (load(kind, tmp_path / "fp8") for _ in range(2))
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        prompts = [batch(r, rows=1, length=5) for r in range(2)]
        expected = [
            plain.generate(p, attention_mask=torch.ones_like(p), **options) for p in prompts
        ]
        balancer = balance(model, group)
        with balancer.unchanged_weights():
            prompt = prompts[rank]
            tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert torch.equal(tokens, expected[rank])
        balancer.close()
