"""Parts of the SGLang plug-in that do not import SGLang: refusals, versions, settings."""

from __future__ import annotations

import logging
import pkgutil
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ultraep.integrations import sglang
from ultraep.integrations.sglang.refusals import SGLANG_LOGGER, reasons_of_layer, reasons_of_server
from ultraep.supported import Library

SERVER = {
    "tp_size": 2,
    "ep_size": 2,
    "attn_dp_size": 2,
    "pp_size": 1,
    "moe_dp_size": 1,
    "moe_a2a_backend": "deepep",
    "enable_two_batch_overlap": False,
    "enable_single_batch_overlap": False,
    "enable_eplb": False,
    "ep_num_redundant_experts": 0,
    "init_expert_location": "trivial",
    "enable_waterfill": False,
    "elastic_ep_backend": None,
    "enable_paged_experts": False,
    "enable_memory_saver": False,
    "enable_lora": None,
    "lora_paths": None,
    "speculative_algorithm": None,
}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"moe_a2a_backend": "none"}, "--moe-a2a-backend none: layers get the tokens of all ranks"),
        ({"tp_size": 1, "ep_size": 1}, "--tp-size 1: there is only one rank"),
        ({"ep_size": 1}, "--ep-size 1: use 2, the --tp-size"),
        ({"attn_dp_size": 1}, "no --attn-dp-size: SGLang does not share the token counts"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"moe_dp_size": 2}, "--moe-dp-size 2"),
        ({"enable_two_batch_overlap": True}, "two-batch overlap bypasses the layer"),
        ({"enable_single_batch_overlap": True}, "single-batch overlap bypasses the layer"),
        ({"enable_eplb": True}, "EPLB (--enable-eplb) moves experts itself"),
        ({"ep_num_redundant_experts": 2}, "--ep-num-redundant-experts 2: SGLang replicates"),
        ({"init_expert_location": "a.json"}, "--init-expert-location a.json: SGLang places"),
        ({"enable_waterfill": True}, "waterfill (--enable-waterfill) replicates shared"),
        ({"elastic_ep_backend": "mooncake"}, "elastic expert parallelism changes the ranks"),
        ({"enable_paged_experts": True}, "paged experts (--enable-paged-experts) are not in"),
        ({"enable_memory_saver": True}, "--enable-memory-saver unmaps the weights"),
        ({"lora_paths": ["a"]}, "LoRA (--enable-lora): replicas would lack the adapters"),
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding (EAGLE) is not tested"),
    ],
)
def test_servers_that_are_not_balanced(changes, reason):
    assert reasons_of_server(SimpleNamespace(**SERVER)) == []
    (message,) = reasons_of_server(SimpleNamespace(**SERVER | changes))
    assert message.startswith(reason)


def layer(method="UnquantizedFusedMoEMethod", runner="triton", tensors=(), state=(), **changes):
    """Return a layer of SGLang with two of four experts."""
    module = torch.nn.Module()
    module.w13_weight = torch.nn.Parameter(torch.zeros(2, 4, 3), requires_grad=False)
    module.w2_weight = torch.nn.Parameter(torch.zeros(2, 3, 2), requires_grad=False)
    for name, tensor in dict(tensors).items():
        setattr(module, name, tensor)
    module.layer_name, module.num_local_experts = "layer", 2
    module.num_fused_shared_experts = changes.get("shared", 0)
    module.moe_tp_size = changes.get("moe_tp_size", 1)
    module.runner_backend = SimpleNamespace(value=runner) if runner else None
    flags = {"apply_router_weight_on_input": False, "no_combine": False}
    module.moe_runner_config = SimpleNamespace(**{k: changes.get(k, v) for k, v in flags.items()})
    module.quant_method = type(method, (), {"block_quant": True, **dict(state)})()
    return module


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": "W4AFp8MoEMethod"}, "layer is quantised by W4AFp8MoEMethod, which has no"),
        (
            {"method": "Fp8MoEMethod", "state": {"block_quant": False}},
            "layer is quantised by Fp8MoEMethod without block scales",
        ),
        ({"method": "Fp8MoEMethod", "state": {"is_fp4_expert": True}}, "layer is quantised to FP4"),
        ({"runner": "flashinfer_trtllm"}, "layer runs on flashinfer_trtllm: use --moe-runner-"),
        ({"runner": None}, "layer runs on None: use --moe-runner-backend deep_gemm or triton"),
        (
            {"tensors": {"mask": torch.zeros(4)}},
            "layer has tensors without a bundle: mask is unknown",
        ),
        ({"shared": 1}, "layer has 1 shared experts among the routed ones: use --disable-shared"),
        ({"apply_router_weight_on_input": True}, "layer multiplies its inputs by gates"),
        ({"no_combine": True}, "layer does not sum the outputs of a token"),
        ({"moe_tp_size": 2}, "layer splits experts over 2 ranks"),
    ],
)
def test_layers_that_are_not_balanced(changes, reason):
    scales = {"w13_weight_scale_inv": torch.zeros(2, 1, 1), "w13_input_scale": None}
    assert reasons_of_layer(layer()) == []
    assert reasons_of_layer(layer("Fp8MoEMethod", "deep_gemm", scales)) == []
    (message,) = reasons_of_layer(layer(**changes))
    assert message.startswith(reason)


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (None, "SGLang 0.5.23 is needed, but no version of it is installed: pip install"),
        ("0.5.22", "SGLang 0.5.23 is needed, but 0.5.22 is installed"),
        ("0.5.24", "SGLang 0.5.23 is needed, but 0.5.24 is installed"),
        ("0.5.23", "No module named 'sglang'"),
    ],
)
def test_unsupported_versions_are_not_balanced(monkeypatch, caplog, installed, message):
    monkeypatch.setattr(Library, "installed", lambda _: installed)
    with caplog.at_level(logging.DEBUG, SGLANG_LOGGER):
        sglang.register()
        assert not caplog.records
        monkeypatch.setenv("ULTRAEP_SLOTS", "1")
        sglang.register()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"ultraep: no MoE layer balanced: {message}" in record.getMessage()
    assert "sglang" not in sys.modules


def test_an_invalid_setting_ends_the_process(monkeypatch):
    monkeypatch.setenv("ULTRAEP_SLOTS", "many")
    with pytest.raises(SystemExit, match="ultraep: ULTRAEP_SLOTS must be an integer, got 'many'"):
        sglang.register()


def test_the_entry_point_is_the_plug_in():
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    (target,) = project["project"]["entry-points"]["sglang.srt.plugins"].values()
    assert pkgutil.resolve_name(target) is sglang.register
