"""Replicas of the experts of quantisation methods, in one process with real vLLM.

For each case, vLLM creates two layers with other weights, converts them for a kernel, and the
plug-in carries each expert of the first layer into a slot of the second one, as bytes. The replica
must be the expert: the same weights and the same quantisation configuration, bit for bit, and
nothing of the second layer. Where the kernel runs here, its outputs must be equal too.

Prints one line of JSON per case; `make test-vllm` runs it (section `methods`).
"""

import importlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import vllm_standin
from vllm_engines import ENVIRONMENT

EXPERTS, HIDDEN, FFN = 4, 256, 128


@dataclass
class Case:
    """A quantisation method of vLLM.

    method: creates it from the configuration of a layer.   backend: value of `--moe-backend`.
    computes: whether the kernel, or its stand-in, runs here.
    """

    method: Callable[[Any], Any]
    backend: str = "triton"
    computes: bool = False


def cases() -> dict[str, Case]:
    """Return all cases by name; imports vLLM."""
    from compressed_tensors.quantization import QuantizationArgs

    def module(name: str) -> Any:
        return importlib.import_module(f"vllm.model_executor.layers.quantization.{name}")

    def compressed(kind: str, name: str, *settings: Any) -> Callable[[Any], Any]:
        folder = "compressed_tensors.compressed_tensors_moe"
        method = getattr(module(f"{folder}.compressed_tensors_moe_{kind}"), name)
        return lambda layer: method(*settings, layer.moe_config)

    def fp8_method(scheme: str, block: list[int] | None) -> Callable[[Any], Any]:
        config = fp8.Fp8Config(True, scheme, weight_block_size=block)
        return lambda layer: fp8.Fp8MoEMethod(config, layer)

    def integers(bits: int, **options: Any) -> QuantizationArgs:
        return QuantizationArgs(num_bits=bits, type="int", **options)

    def wna16(weights: QuantizationArgs) -> Callable[[Any], Any]:
        return compressed("wna16", "CompressedTensorsWNA16MoEMethod", weights, None)

    fp8, modelopt, mxfp4 = module("fp8"), module("modelopt"), module("mxfp4")
    quark, mxfp4_scheme = module("quark.quark_moe"), module("utils.quant_utils").kMxfp4Static
    group = {"strategy": "group", "group_size": 128}
    per_token = {"strategy": "token", "dynamic": True}
    floats = {"num_bits": 8, "type": "float"}
    fp8_args = (
        QuantizationArgs(**floats, strategy="channel"),
        QuantizationArgs(**floats, **per_token),
    )
    int8_args = integers(8, strategy="channel"), integers(8, **per_token)
    nvfp4 = modelopt.ModelOptNvFp4Config(is_checkpoint_nvfp4_serialized=True)
    w8a8_fp8 = "CompressedTensorsW8A8Fp8MoEMethod"
    w8a8_int8 = "CompressedTensorsW8A8Int8MoEMethod"
    w4a4_nvfp4 = "CompressedTensorsW4A4Nvfp4MoEMethod"
    w4a4_mxfp4 = "CompressedTensorsW4A4Mxfp4MoEMethod"
    return {
        "Fp8MoEMethod, blocks": Case(fp8_method("dynamic", [128, 128]), computes=True),
        "Fp8MoEMethod, static": Case(fp8_method("static", None), computes=True),
        w8a8_fp8: Case(compressed("w8a8_fp8", w8a8_fp8, *fp8_args), computes=True),
        w8a8_int8: Case(compressed("w8a8_int8", w8a8_int8, *int8_args), computes=True),
        "CompressedTensorsWNA16MoEMethod, int4": Case(wna16(integers(4, **group)), computes=True),
        "CompressedTensorsWNA16MoEMethod, int4 with zero points": Case(
            wna16(integers(4, symmetric=False, **group))
        ),
        "CompressedTensorsWNA16MoEMethod, int8": Case(wna16(integers(8, **group))),
        w4a4_nvfp4: Case(compressed("w4a4_nvfp4", w4a4_nvfp4), backend="cutlass"),
        w4a4_mxfp4: Case(compressed("w4a4_mxfp4", w4a4_mxfp4)),
        "ModelOptNvFp4FusedMoE": Case(
            lambda layer: modelopt.ModelOptNvFp4FusedMoE(nvfp4, layer.moe_config), backend="cutlass"
        ),
        "Mxfp4MoEMethod": Case(
            lambda layer: mxfp4.Mxfp4MoEMethod(layer.moe_config), backend="marlin"
        ),
        "GptOssMxfp4MoEMethod": Case(
            lambda layer: mxfp4.GptOssMxfp4MoEMethod(layer.moe_config), backend="marlin"
        ),
        "QuarkOCP_MX_MoEMethod": Case(
            lambda layer: quark.QuarkOCP_MX_MoEMethod(layer.moe_config, mxfp4_scheme, None),
            backend="marlin",
        ),
    }


def accept_kernels() -> None:
    """Let vLLM choose kernels of GPUs here; they convert weights, but cannot run.

    Compiled conversions are replaced by torch, with the same shapes and dtypes.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.experts import cutlass_moe, deep_gemm_moe, marlin_moe

    for cls in (
        cutlass_moe.CutlassExpertsFp4,
        cutlass_moe.CutlassExpertsMxfp4,
        deep_gemm_moe.DeepGemmFP4Experts,
        marlin_moe.MarlinExperts,
    ):
        cls._supports_current_device = staticmethod(lambda: True)
        cls._supports_quant_scheme = staticmethod(lambda weight, activation: True)
    _custom_ops.scaled_fp8_quant = scaled_fp8_quant
    _custom_ops.gptq_marlin_repack = gptq_marlin_repack
    torch.Tensor.cuda = lambda self: self  # type: ignore[method-assign]
    torch.accelerator.empty_cache = lambda: None  # type: ignore[assignment]


def scaled_fp8_quant(
    values: torch.Tensor,
    scale: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix to FP8 with one scale, or one per row."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    if scale is None:
        dims = 1 if use_per_token_if_dynamic else (0, 1)
        scale = values.abs().amax(dims, keepdim=True).float() / limit
        scale = scale if use_per_token_if_dynamic else scale.reshape(1)
    quantised = (values / scale).clamp(-limit, limit).to(torch.float8_e4m3fn)
    return (quantised if output is None else output.copy_(quantised)), scale


def gptq_marlin_repack(
    b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> torch.Tensor:
    """Return packed weights in the shape of Marlin's tiles; their order does not matter here."""
    assert b_q_weight.dtype == torch.int32
    assert b_q_weight.shape == (size_k * num_bits // 32, size_n)
    return b_q_weight.T.reshape(size_k // 16, size_n * num_bits // 2).contiguous()


def make_layer(case: Case, seed: int, config: Any) -> Any:
    """Return a layer with random weights, converted for the kernel of the case."""
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

    config.kernel_config.moe_backend = case.backend
    quantisation = SimpleNamespace(
        get_quant_method=lambda layer, _: case.method(layer), online_quantization_config=None
    )
    runner = FusedMoEFactory(
        num_experts=EXPERTS,
        top_k=2,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        params_dtype=torch.float32,
        quant_config=quantisation,
        prefix=f"layers.{seed}.experts",
    )
    layer = runner.routed_experts
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in layer.named_parameters():
        setattr(
            layer, name, torch.nn.Parameter(random_like(parameter, generator), requires_grad=False)
        )
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random values of the same shape and dtype, positive, without NaN."""
    values = torch.rand(tensor.shape, generator=generator) * 0.9 + 0.05
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        return values.to(tensor.dtype)
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return values.to(tensor.dtype)
    limit = torch.iinfo(torch.uint8).max if tensor.dtype.itemsize == 1 else 2**31
    integers = torch.randint(0, limit // 2, tensor.shape, generator=generator)
    if tensor.dtype.is_floating_point:
        return integers.to(torch.uint8).view(tensor.dtype)
    return integers.to(tensor.dtype)


def check(case: Case, config: Any) -> dict[str, Any]:
    """Return what was compared; raises AssertionError if a replica is not its expert."""
    from ultraep.bundle import Layout
    from ultraep.integrations.serving.tensors import tensors_without_bundle
    from ultraep.integrations.vllm.refusals import METHODS

    home, other = (make_layer(case, seed, config) for seed in (1, 2))
    assert {cls.__name__ for cls in type(home.quant_method).__mro__} & set(METHODS)
    assert tensors_without_bundle(home, EXPERTS) == []
    layout = Layout.of(home.bundle, EXPERTS)
    assert layout == Layout.of(other.bundle, EXPERTS)
    replicas = []
    for expert in range(EXPERTS):
        row = layout.pack(home.bundle, expert)
        replicas.append(other.replica(layout.views(row[None]), 0))
    result = {"tensors": sorted(home.bundle), "bytes": layout.nbytes}
    result["kernel"] = type(home.quant_method.moe_kernel.fused_experts).__name__
    result["compared"] = sum(
        check_replica(home, other, replica, expert) for expert, replica in enumerate(replicas)
    )
    check_apply(home)
    if case.computes:
        result["rows"] = sum(
            check_outputs(home, other, replica, expert) for expert, replica in enumerate(replicas)
        )
    return result


def check_replica(home: Any, other: Any, replica: Any, expert: int) -> int:
    """Compare everything that a kernel reads; return the number of tensors."""
    get_config = home.quant_method.get_fused_moe_quant_config
    own = {"w1": home.w13_weight, "w2": home.w2_weight, **tensors_in(get_config(home))}
    read = {"w1": replica.w13_weight, "w2": replica.w2_weight}
    read |= tensors_in(other.quant_method.get_fused_moe_quant_config(replica))
    foreign = {t.untyped_storage().data_ptr() for t in tensors_of(other)}
    assert own.keys() == read.keys()
    for name, tensor in own.items():
        if tensor.ndim and len(tensor) == EXPERTS:
            tensor = tensor[expert : expert + 1]
            assert strides(read[name]) == strides(tensor), name
        assert bits(read[name]) == bits(tensor), name
        assert read[name].untyped_storage().data_ptr() not in foreign, name
    return len(own)


def check_apply(layer: Any) -> None:
    """Check that the method passes nothing but `w13_weight` and `w2_weight` to its kernel."""
    calls: list[dict[str, Any]] = []

    class Recorder:
        is_monolithic = False
        fused_experts = layer.quant_method.moe_kernel.fused_experts

        def apply(self, *inputs: Any, **options: Any) -> torch.Tensor:
            names = ("hidden_states", "w1", "w2", "topk_weights", "topk_ids")
            calls.append({**dict(zip(names, inputs, strict=False)), **options})
            return torch.empty(0)

    x, ids = torch.zeros(3, HIDDEN), torch.zeros(3, 2, dtype=torch.int32)
    with mock.patch.object(layer.quant_method, "moe_kernel", Recorder()):
        layer.quant_method.apply(layer, x, torch.ones(3, 2), ids, None, None)
    (call,) = calls
    assert call.pop("w1") is layer.w13_weight
    assert call.pop("w2") is layer.w2_weight
    assert call.keys() - {"shared_experts", "shared_experts_input"} == {
        "hidden_states",
        "topk_weights",
        "topk_ids",
        "activation",
        "global_num_experts",
        "expert_map",
        "apply_router_weight_on_input",
    }


def check_outputs(home: Any, other: Any, replica: Any, expert: int) -> int:
    """Compare outputs of an expert at home and in a slot of the other layer."""
    generator = torch.Generator().manual_seed(expert)
    rows = torch.randn(7, HIDDEN, generator=generator)
    gates = torch.rand(7, generator=generator)
    counts = [7 * (number == expert) for number in range(EXPERTS)]
    at_home = home.compute(rows, gates, counts, home)
    in_slot = other.compute(rows, gates, [7], replica)
    assert bits(at_home) == bits(in_slot)
    assert bits(in_slot) != bits(other.compute(rows, gates, counts, other))
    return len(rows)


def tensors_in(config: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return all tensors of a quantisation configuration, by path."""
    found = {}
    items = [(f.name, getattr(config, f.name)) for f in fields(config)]
    for name, value in items:
        if isinstance(value, torch.Tensor):
            found[prefix + name] = value
        elif is_dataclass(value):
            found |= tensors_in(value, f"{prefix}{name}.")
    return found


def tensors_of(layer: Any) -> Iterator[torch.Tensor]:
    yield from layer.parameters()
    yield from (t for t in vars(layer).values() if isinstance(t, torch.Tensor))


def bits(tensor: torch.Tensor) -> tuple[list[int], str, bytes]:
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return list(tensor.shape), str(tensor.dtype), raw


def strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides of dimensions with more than one element."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1]


def check_settings_of_compilation(config: Any) -> dict[str, Any]:
    """Check that graphs are split at the layers and that settings are part of the cache key."""
    import vllm.model_executor.layers.fused_moe.runner.moe_runner  # registers the operation
    from vllm.compilation.backends import split_graph

    from ultraep.integrations.serving.settings import ServingSettings
    from ultraep.integrations.vllm.service import adapt_compilation

    del vllm
    config.compilation_config.splitting_ops = ["vllm::unified_attention"]
    keys = []
    for slots in (1, 2, 1):
        adapt_compilation(config, ServingSettings(slots=slots))
        keys.append(str(config.additional_config))
    assert keys[0] == keys[2] != keys[1]
    ops = config.compilation_config.splitting_ops
    assert len(ops) == len(set(ops)) == 3
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    before = graph.call_function(torch.relu, (x,))
    layer = torch.ops.vllm.moe_forward.default
    inside = graph.call_function(layer, (before, before, None, None, "layer", 0))
    graph.output(graph.call_function(torch.relu, (inside,)))
    _, pieces = split_graph(torch.fx.GraphModule(torch.nn.Module(), graph), ops)
    targets = [
        [node.target for node in p.graph.graph.nodes if node.op == "call_function"] for p in pieces
    ]
    assert [layer in piece for piece in targets] == [False, True, False]
    assert [piece.is_splitting_graph for piece in pieces] == [False, True, False]
    return {"pieces": len(pieces)}


def check_batches_left_to_vllm(config: Any) -> dict[str, Any]:
    """Check which batches of GPUs vLLM runs itself; CPU ranks have no all-to-all of vLLM."""
    from vllm.config import CUDAGraphMode

    from ultraep.integrations.serving.settings import ServingSettings
    from ultraep.integrations.vllm import service as module

    service = module.Service(config, ServingSettings())
    checked = 0
    for device in ("cuda", "cpu"):
        weight = SimpleNamespace(device=SimpleNamespace(type=device))
        layer = SimpleNamespace(w2_weight=weight, layer_name=device, least_tokens=100)
        for number, (mode, tokens, left) in enumerate(
            [
                (CUDAGraphMode.NONE, 512, True),  # the profile run
                (CUDAGraphMode.NONE, 512, False),
                (CUDAGraphMode.PIECEWISE, 512, False),
                (CUDAGraphMode.PIECEWISE, 99, True),
                (CUDAGraphMode.FULL, 512, True),
            ]
        ):
            counts = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([tokens - 9, 9]))
            context = SimpleNamespace(cudagraph_runtime_mode=mode, dp_metadata=counts)
            with mock.patch.object(module, "get_forward_context", lambda c=context: c):
                assert service.leaves(layer) == (left and device == "cuda"), (device, number)
            checked += 1
    return {"batches": checked}


def check_recorded_routes(config: Any) -> dict[str, Any]:
    """Check that vLLM records logical ids, and that a balanced layer leaves them unchanged.

    Two threads are the ranks of eight experts. Slots have other numbers than experts: expert 4 is
    in slot 5 at home, and the hot expert 0 has a replica.
    """
    from vllm.config import set_current_vllm_config

    from ultraep import BalanceConfig, Balancer, LocalGroup

    layers = [make_layer(cases()["Fp8MoEMethod, blocks"], seed, config) for seed in (3, 4)]
    runner = config.compilation_config.static_forward_context[layers[0].layer_name]
    recorded: list[torch.Tensor] = []
    runner.router.set_capture_fn(recorded.append)
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for _ in layers:
        x, logits = (torch.randn(40, n, generator=generator) for n in (HIDDEN, 2 * EXPERTS))
        logits[:, 0] += 3
        inputs.append((x, *runner.router.select_experts(x, logits)))
    before = [ids.clone() for ids in recorded]
    assert sorted(torch.cat(before).unique().tolist()) == list(range(2 * EXPERTS))

    def serve(comm: Any) -> int:
        layer, (x, gates, ids) = layers[comm.rank], inputs[comm.rank]
        balance = BalanceConfig(objective="balance")
        layer.balancer = Balancer(comm, experts=2 * EXPERTS, config=balance)
        layer.layer_index = layer.balancer.register_layer()
        layer.service = SimpleNamespace(policy=lambda _: None)
        with set_current_vllm_config(config), torch.inference_mode():
            assert layer.run_balanced(x, gates, ids).shape == x.shape
        replicas: int = layer.last_plan.to_host().num_replicas
        return replicas

    replicas = LocalGroup(2).run(serve)
    assert min(replicas) > 0
    for logical, (_, _, ids), kept in zip(before, inputs, recorded, strict=True):
        assert torch.equal(logical, ids)
        assert torch.equal(logical, kept)
    return {"rows": sum(ids.numel() for ids in before), "replicas": replicas[0]}


def main() -> None:
    """Run all checks; the first one that fails raises."""
    os.environ.update(ENVIRONMENT, ULTRAEP_SLOTS="1")
    vllm_standin.register()
    accept_kernels()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    from ultraep.integrations.vllm.experts import install

    install()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, address, 0, "gloo")
        initialize_model_parallel(1)
    checks: dict[str, Callable[[Any], dict[str, Any]]] = {
        name: partial(check, case) for name, case in cases().items()
    }
    checks["graphs are captured between layers"] = check_settings_of_compilation
    checks["batches left to vLLM"] = check_batches_left_to_vllm
    checks["recorded routes"] = check_recorded_routes
    for name, run in checks.items():
        config = VllmConfig()
        config.model_config = SimpleNamespace(
            quantization_config=None, hf_config=None, is_moe=True, dtype=torch.float32
        )
        with set_current_vllm_config(config):
            result = run(config)
        print("CASE", json.dumps({"name": name, **result}), flush=True)


if __name__ == "__main__":
    main()
