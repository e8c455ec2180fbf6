"""Checks of Megatron-Core settings, and of the output of its routers, without importing it."""

from types import SimpleNamespace

import pytest
import torch

from ultraep import ConfigError
from ultraep.integrations.megatron.settings import REFUSED, check_options, check_settings, choices

BAD = {
    "expert_tensor_parallel_size": 2,
    "moe_extended_tp": True,
    "fp8_param": True,
    "fp4": "e2m1",
    "moe_flex_dispatcher_backend": "ncclep",
    "quant_recipe": "of modules",
    "transformer_impl": "inference_optimized",
    "moe_expert_rank_capacity_factor": 1.5,
    "moe_shared_expert_overlap": True,
    "overlap_moe_expert_parallel_comm": True,
    "delay_wgrad_compute": True,
    "overlap_dispatch_backward_with_experts_wgrad": True,
    "moe_single_grouped_weight": True,
    "moe_single_grouped_bias": True,
    "moe_paged_stash": True,
    "expert_gtp_weight_remat_size": 2,
    "cuda_graph_impl": "local",
    "enable_cuda_graph": True,
    "external_cuda_graph": True,
    "cpu_offloading": True,
    "fine_grained_activation_offloading": True,
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
    for recipe in ("blockwise", "mxfp8"):
        check_settings(SimpleNamespace(**fp8, fp8_recipe=recipe))
    for recipe in ("delayed", "tensorwise", "custom"):
        message = f"fp8_recipe='{recipe}' cannot be balanced, use 'blockwise' or 'mxfp8': scales"
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
