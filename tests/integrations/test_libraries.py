"""Unsupported versions of libraries and settings of Megatron-Core are refused by name."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from ultraep import BackendUnavailable, ConfigError
from ultraep.integrations.megatron.settings import REFUSED, check_options, check_settings, choices
from ultraep.supported import (
    FLEX_DEEPEP,
    MEGATRON,
    OWN_EXPERT_PARALLELISM,
    SGLANG,
    TORCHTITAN,
    TRANSFORMERS,
    VLLM,
    Library,
)

VERSIONS = [  # refused, not tested, accepted
    (MEGATRON, ["0.15.3"], ["0.20.0rc1", "1.16.0"], ["0.16.1", "0.16.1rc2+local", "0.19.2"]),
    (TORCHTITAN, ["0.2.2"], ["0.4.0", "1.0.0.dev1"], ["0.3.0", "0.3.1"]),
    (TRANSFORMERS, ["4.57.1", "5.3.0"], ["5.24.0", "6.0.0.dev0"], ["5.17.0", "5.23.0"]),
    (VLLM, ["0.31.2"], ["0.33.0rc1", "1.0"], ["0.32.0", "0.32.1", "0.32.0+cpu"]),
    (SGLANG, ["0.5.22.post1", "0.5.24", "0.6"], [], ["0.5.23", "0.5.23.post1"]),
    (OWN_EXPERT_PARALLELISM, ["5.21.1"], [], ["5.22.0", "6.0"]),  # `TRANSFORMERS` warns
    (FLEX_DEEPEP, ["2.0.0"], [], ["1.2.1"]),
]


@pytest.mark.parametrize(
    ("known", "refused", "untested", "accepted"), VERSIONS, ids=lambda value: str(value)
)
def test_versions(known, refused, untested, accepted, monkeypatch):
    for version in accepted:
        monkeypatch.setattr(Library, "installed", lambda _, version=version: version)
        known.check()
    for version in untested:
        monkeypatch.setattr(Library, "installed", lambda _, version=version: version)
        text = f"{known.name} {version} is newer than the tested versions, {known.supported()}: if"
        with pytest.warns(UserWarning, match=re.escape(text)):
            known.check()
    for version in refused:
        monkeypatch.setattr(Library, "installed", lambda _, version=version: version)
        with pytest.raises(BackendUnavailable) as error:
            known.check()
        message = f"{known.name} {known.supported()} is needed, but {version} is installed"
        assert message in str(error.value)


@pytest.mark.parametrize("known", [MEGATRON, VLLM])
def test_a_missing_library(known, monkeypatch):
    monkeypatch.setattr(Library, "installed", lambda _: None)
    with pytest.raises(
        BackendUnavailable, match=rf"no version of it is installed: {re.escape(known.remedy)}"
    ):
        known.check()


def test_importing_an_integration_without_its_library():
    """Megatron-Core is imported only when a layer of it is balanced."""
    code = """
import importlib, importlib.metadata as metadata, sys
def missing(name): raise metadata.PackageNotFoundError(name)
metadata.version = missing
import ultraep.integrations.megatron
assert 'megatron.core' not in sys.modules
for name in ("torchtitan", "transformers"):
    try:
        importlib.import_module(f"ultraep.integrations.{name}")
    except ImportError as error:
        print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for name, line in zip(("torchtitan", "transformers"), done.stdout.splitlines(), strict=True):
        assert line.startswith("BackendUnavailable ")
        assert f"pip install '.[{name}]'" in line


SWITCHES = """
moe_extended_tp fp8_param moe_shared_expert_overlap overlap_moe_expert_parallel_comm
delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad moe_single_grouped_weight
moe_single_grouped_bias moe_paged_stash enable_cuda_graph external_cuda_graph cpu_offloading
fine_grained_activation_offloading
"""
BAD = dict.fromkeys(SWITCHES.split(), True) | {
    "expert_tensor_parallel_size": 2,
    "fp4": "e2m1",
    "moe_flex_dispatcher_backend": "ncclep",
    "quant_recipe": "of modules",
    "transformer_impl": "inference_optimized",
    "moe_expert_rank_capacity_factor": 1.5,
    "expert_gtp_weight_remat_size": 2,
    "cuda_graph_impl": "local",
    "moe_latent_size": 64,
}


@pytest.mark.parametrize("setting", [refused.setting for refused in REFUSED])
def test_a_setting_is_refused_by_name_and_value(setting):
    check_settings(SimpleNamespace(num_moe_experts=8))
    config = SimpleNamespace(num_moe_experts=8, **{setting: BAD[setting]})
    with pytest.raises(ConfigError, match=f"{setting}={BAD[setting]!r} cannot be balanced, use "):
        check_settings(config)


def test_recipes_of_fp8():
    fp8 = {"num_moe_experts": 8, "fp8": "e4m3"}
    check_settings(SimpleNamespace(**fp8, fp8_recipe="blockwise"))
    for recipe in ("delayed", "tensorwise", "custom", "mxfp8"):
        message = f"fp8_recipe='{recipe}' cannot be balanced, use 'blockwise': scales"
        with pytest.raises(ConfigError, match=message):
            check_settings(SimpleNamespace(**fp8, fp8_recipe=recipe))
    padded = {"fp8_recipe": "blockwise", "moe_router_padding_for_quantization": True}
    with pytest.raises(ConfigError, match="moe_router_padding_for_quantization=True cannot be"):
        check_settings(SimpleNamespace(**fp8, **padded))


def test_no_experts_are_refused():
    with pytest.raises(ConfigError, match="num_moe_experts is None"):
        check_settings(SimpleNamespace(num_moe_experts=None))


@pytest.mark.parametrize("name", ["group", "domain", "experts"])
def test_options_that_megatron_sets(name):
    with pytest.raises(ConfigError, match=f"'{name}' cannot be set"):
        check_options({"slots": 1, name: 3})


def test_choices_of_dense_maps():
    """Missing choices are padding; chosen experts of probability 0 are, if experts are padded."""
    probs = torch.tensor([[0.1, 0.0, 0.7], [0.0, 0.0, 0.4], [0.0, 0.0, 0.0]])
    chosen = torch.tensor([[True, False, True], [True, False, True], [False, False, False]])
    ids, gates, _ = choices(probs, chosen, 2, padded=False)
    assert ids.tolist() == [[2, 0], [2, 0], [-1, -1]]
    assert gates[:2].tolist() == [pytest.approx([0.7, 0.1]), pytest.approx([0.4, 0.0])]
    ids, _, _ = choices(probs, chosen, 2, padded=True)
    assert ids.tolist() == [[2, 0], [2, -1], [-1, -1]]
