"""Parts of the vLLM plug-in that do not import vLLM: settings, refusals, counters, versions."""

import logging
import re
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import numpy as np
import prometheus_client
import pytest
import torch
from servers import logged_by_plugin

import ultraep
from ultraep import ConfigError
from ultraep.bundle import Layout
from ultraep.integrations import vllm
from ultraep.integrations.serving.counters import ServingCounters
from ultraep.integrations.serving.settings import ServingSettings, read_settings
from ultraep.integrations.serving.tensors import carry_experts, tensors_without_bundle
from ultraep.integrations.vllm.refusals import BACKENDS, reasons_of_engine, reasons_of_layer
from ultraep.passes import Passes, PassRecord
from ultraep.supported import Library


def test_settings_of_environment_and_additional_configuration():
    assert read_settings({}, None) is None
    assert read_settings({"PATH": "/bin", "ULTRAEP_TRACE": "run"}, {"other": 1}) is None
    assert read_settings({"ULTRAEP_SLOTS": "0"}, None) is None
    assert read_settings({}, {"ultraep": {"slots": 0}}) is None
    environment = {
        "ULTRAEP_SLOTS": "2",
        "ULTRAEP_POLICY": "none",
        "ULTRAEP_TOLERANCE": "0.05",
        "ULTRAEP_RECORD": "traces",
        "ULTRAEP_MIN_ROWS": "7",
    }
    assert read_settings(environment, None) == ServingSettings(
        slots=2, policy="none", tolerance=0.05, record="traces", min_rows=7
    )
    assert read_settings({"ULTRAEP_POLICY": "ultraep"}, None) == ServingSettings()
    assert read_settings({}, {"ultraep": {}}) == ServingSettings()
    both = read_settings({"ULTRAEP_SLOTS": "1"}, {"ultraep": {"slots": 1, "tolerance": 0.1}})
    assert both == ServingSettings(slots=1, tolerance=0.1)


@pytest.mark.parametrize(
    ("environment", "additional", "message"),
    [
        ({"ULTRAEP_SLOTS": "one"}, None, "ULTRAEP_SLOTS must be an integer, got 'one'"),
        ({"ULTRAEP_SLOTS": "-1"}, None, "slots must be an integer of at least 0, got -1"),
        ({"ULTRAEP_SLOT": "1"}, None, "unknown setting ULTRAEP_SLOT; choose from ULTRAEP_SLOTS"),
        ({"ULTRAEP_TOLERANCE": "low"}, None, "ULTRAEP_TOLERANCE must be a number, got 'low'"),
        ({"ULTRAEP_TOLERANCE": "-1"}, None, "tolerance must lie between 0 and 1000, got -1"),
        ({"ULTRAEP_POLICY": "best"}, None, "best"),
        ({"ULTRAEP_RECORD": ""}, None, "record must be the path of a directory, got ''"),
        ({"ULTRAEP_MIN_ROWS": "0"}, None, "min_rows must be an integer of at least 1, got 0"),
        ({}, {"ultraep": True}, "the additional configuration needs .*, got True"),
        ({}, {"ultraep": {"slot": 1}}, "unknown setting slot; choose from slots, policy"),
        ({}, {"ultraep": {"slots": "1"}}, "slots must be an integer of at least 0, got '1'"),
        (
            {"ULTRAEP_SLOTS": "1"},
            {"ultraep": {"slots": 2}},
            "ULTRAEP_SLOTS is 1, but the additional configuration has 2: set only one",
        ),
    ],
)
def test_invalid_settings(environment, additional, message):
    with pytest.raises(ConfigError, match=message):
        read_settings(environment, additional)


def engine(**changes):
    """Return a configuration of vLLM that is balanced, with these changes."""
    parallel = {
        "data_parallel_size": 2,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_expert_parallel": True,
        "enable_eplb": False,
        "enable_elastic_ep": False,
        "use_ubatching": False,
        "all2all_backend": "allgather_reducescatter",
    }
    model = {"enable_sleep_mode": False}
    whole = {"lora_config": None, "speculative_config": None}
    parts = [
        SimpleNamespace(**{name: changes.get(name, value) for name, value in part.items()})
        for part in (parallel, model, whole)
    ]
    parts[2].parallel_config, parts[2].model_config, _ = parts
    graphs = SimpleNamespace(name=changes.get("cudagraph_mode", "FULL_AND_PIECEWISE"))
    parts[2].compilation_config = SimpleNamespace(cudagraph_mode=graphs)
    return parts[2]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data_parallel_size": 1}, "--data-parallel-size 1: there is only one rank"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2: several ranks have the same"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ({"prefill_context_parallel_size": 4}, "--prefill-context-parallel-size 4"),
        ({"enable_expert_parallel": False}, "no --enable-expert-parallel"),
        ({"enable_eplb": True}, "EPLB (--enable-eplb) moves experts itself"),
        ({"enable_elastic_ep": True}, "elastic expert parallelism changes the ranks"),
        ({"use_ubatching": True}, "dual batch overlap runs two batches of a layer at the same"),
        ({"cudagraph_mode": "FULL"}, "cudagraph_mode FULL captures prefill batches"),
        ({"enable_sleep_mode": True}, "sleep mode unmaps the weights"),
        ({"lora_config": object()}, "LoRA (--enable-lora): replicas would lack the adapters"),
        (
            {"speculative_config": SimpleNamespace(method="mtp")},
            "speculative decoding (mtp): draft",
        ),
        *(
            ({"all2all_backend": backend}, f"--all2all-backend {backend}: {reason}")
            for backend, reason in BACKENDS.items()
        ),
    ],
)
def test_engines_that_are_not_balanced(changes, reason):
    assert reasons_of_engine(engine()) == []
    (message,) = reasons_of_engine(engine(**changes))
    assert message.startswith(reason)


WEIGHTS = {"w13_weight": torch.zeros(2, 4, 3), "w2_weight": torch.zeros(2, 3, 2)}


class Experts(torch.nn.Module):
    """A layer of vLLM with four experts, on rank 1 of 2."""

    def __init__(
        self,
        method="UnquantizedFusedMoEMethod",
        kernel="CPUUnquantizedExperts",
        monolithic=False,
        state=None,
        tensors=WEIGHTS,
        attributes=None,
        shared=0,
        places=(-1, -1, 0, 1),
    ):
        super().__init__()
        experts = type("ArmExperts", (type(kernel, (), {}),), {})() if kernel else None
        vars(experts or self).update(state or {})
        self.layer_name = "layer"
        self.quant_method = type(method, (), {})()
        self.quant_method.moe_kernel = SimpleNamespace(fused_experts=experts) if kernel else None
        self.quant_method.is_monolithic = monolithic
        self.expert_map_manager = SimpleNamespace(num_fused_shared_experts=shared)
        self.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(ep_rank=1))
        self._expert_map, self.local_num_experts = places, 2
        for name, tensor in tensors.items():
            setattr(self, name, torch.nn.Parameter(tensor, requires_grad=False))
        vars(self).update(attributes or {})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"method": "CompressedTensorsW4A8Fp8MoEMethod"},
            "layer is quantised by CompressedTensorsW4A8Fp8MoEMethod, which h",
        ),
        ({"kernel": None}, "layer has no modular kernel"),
        ({"kernel": "MoonEPExperts"}, "layer runs on ArmExperts: use ArmCPUExpertsInt8, CPUExpe"),
        ({"monolithic": True}, "layer runs on ArmExperts, which routes tokens itself"),
        (
            {"state": {"ab_strides1": torch.zeros(2)}},
            "layer runs on ArmExperts, which keeps data of all its experts: ab_strides1$",
        ),
        (
            {"attributes": {"workspace": torch.zeros(9)}},
            "layer has tensors without a bundle: workspace is unknown$",
        ),
        (
            {"tensors": {**WEIGHTS, "w2_scale": torch.zeros(4, 5)}},
            r"layer has tensors without a bundle: w2_scale has shape \[4, 5\] for 2 experts$",
        ),
        (
            {"tensors": {**WEIGHTS, "w2_scale": torch.zeros(2, 3, 8)[..., :5]}},
            r"layer has tensors without a bundle: w2_scale has gaps \(strides \[24, 8, 1\]\)$",
        ),
        ({"shared": 1}, "layer has 1 shared experts among the routed ones"),
        ({"places": (0, 1, -1, -1)}, "layer holds other experts than its placement says"),
    ],
)
def test_layers_that_are_not_balanced(changes, reason):
    homes = [0, 0, 1, 1]
    assert reasons_of_layer(Experts(), homes) == []
    router = {"e_score_correction_bias": torch.zeros(4)}
    assert reasons_of_layer(Experts(tensors=WEIGHTS | router), homes) == []
    (message,) = reasons_of_layer(Experts(**changes), homes)
    assert re.match(reason, message)


def random_bytes(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 128, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.int32])
@pytest.mark.parametrize("form", ["contiguous", "transposed", "one per expert", "expanded"])
def test_replicas_have_the_bits_and_strides_of_their_expert(dtype, form):
    size = dtype.itemsize
    tensor = random_bytes(2, 6, 4 * size, seed=0).view(dtype)
    if form == "transposed":
        tensor = tensor.mT
    elif form == "one per expert":
        tensor = tensor[:, 0, 0].contiguous()
    elif form == "expanded":
        tensor = tensor[:1, 0, :1].expand(2, 1)
    home = Experts(tensors=WEIGHTS | {"w13_scale": tensor})
    (carried,) = [c for c in carry_experts(home, 2).values() if "w13_scale" in c.names]
    assert tensors_without_bundle(home, 2) == []
    bundle = {name: c.stack for name, c in carry_experts(home, 2).items()}
    layout = Layout.of(bundle, 2)
    for expert in range(2):
        row = layout.pack(bundle, expert)
        replica = carried.restore(layout.views(row[None])["w13_scale"])
        own = tensor[expert : expert + 1]
        assert replica.dtype == dtype
        assert replica.shape == own.shape
        assert torch.equal(
            replica.contiguous().view(torch.uint8), own.contiguous().view(torch.uint8)
        )
        assert form == "expanded" or replica.stride()[1:] == own.stride()[1:]


def test_a_value_that_experts_share_travels_with_each():
    scalar = torch.tensor(0.25)
    home = Experts(tensors=WEIGHTS | {"w2_input_scale": scalar})
    carried = carry_experts(home, 2)["w2_input_scale"]
    assert carried.stack.shape == (2,)
    assert carried.restore(carried.stack[1:]).shape == ()
    assert carried.restore(carried.stack[1:]) == 0.25


def test_counters():
    registry = prometheus_client.CollectorRegistry()
    counters = ServingCounters(0, registry)
    loads = np.array([[30, 0, 0, 0], [30, 0, 2, 2]])
    for policy in ("none", "ultraep", "ultraep"):
        config = ultraep.BalanceConfig(policy=policy)
        plan = ultraep.plan(loads, ultraep.Topology(ranks=2, experts=4, slots=1), config)
        record = PassRecord(Passes(layer=0, step=1), "forward")
        record.plan, record.seconds = plan, {"experts": 0.25}
        if policy == "none":
            record.bytes_sent, record.replicas_sent = {"weights": 4096}, {"weights": 2}
        counters.add(record)

    def value(name, **labels):
        return registry.get_sample_value(f"ultraep_{name}", labels)

    assert value("imbalance_before_count", policy="ultraep") == 2
    assert value("imbalance_before_sum", policy="ultraep") == pytest.approx(2 * 60 / 32)
    assert value("imbalance_after_sum", policy="ultraep") == pytest.approx(2)
    assert value("imbalance_after_sum", policy="none") == pytest.approx(60 / 32)
    assert value("copies_planned_total") == 2
    assert value("copies_sent_total") == 2
    assert value("weights_sent_bytes_total") == 4096
    assert value("stage_seconds_total", stage="experts") == 0.75


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (None, "vLLM 0.32.x is needed, but no version of it is installed: pip install"),
        ("0.31.2", "vLLM 0.32.x is needed, but 0.31.2 is installed"),
        ("0.33.0", "no MoE layer balanced: No module named 'vllm'"),
    ],
)
def test_unsupported_versions_are_not_balanced(monkeypatch, caplog, installed, message):
    monkeypatch.setattr(Library, "installed", lambda _: installed)
    monkeypatch.setenv("ULTRAEP_SLOTS", "1")
    with caplog.at_level(logging.DEBUG, vllm.VLLM_LOGGER):
        vllm.register()
        monkeypatch.delenv("ULTRAEP_SLOTS")
        vllm.register()
    lines = [record.getMessage() for record in caplog.records]
    levels = [record.levelname for record in caplog.records]
    if installed == "0.33.0":  # the warning comes before the attempt to import vLLM
        warning = "vLLM 0.33.0 is newer than the tested versions, 0.32.x: if"
        assert all(line.startswith(warning) for line in lines[::2])
        lines, levels = lines[1::2], levels[1::2]
    assert levels == ["WARNING", "DEBUG"]
    assert message in lines[0]
    assert logged_by_plugin(caplog.text) == lines
    assert "vllm" not in sys.modules


def test_vllm_finds_the_plug_in():
    (plugin,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "ultraep"]
    assert plugin.load() is vllm.register
