"""A plug-in for SGLang 0.5.23 that fills its gaps on CPUs without AMX. Only tests use it.

- Data-parallel attention asks the torch-native attention for a value that it lacks.
- SGLang's own expert parallelism passes the id -1 to a kernel that does not accept it.
- FP8 experts need AMX and half precision: here their block scales are applied in torch, and the
  activations may be float32, so that tokens can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def register() -> None:
    """Register the hooks."""
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
    native = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
    HookRegistry.register(native, only_present_experts, HookType.AROUND)
    fp8 = "sglang.srt.layers.quantization.fp8.Fp8MoEMethod"
    HookRegistry.register(f"{fp8}.apply", apply_fp8, HookType.REPLACE)
    dtypes = "sglang.srt.layers.quantization.fp8.Fp8Config.get_supported_act_dtypes"
    HookRegistry.register(dtypes, lambda *_: [torch.float32], HookType.REPLACE)
    HookRegistry.register(f"{fp8}.process_weights_after_loading", lambda *_: None, HookType.REPLACE)


def only_present_experts(
    original: Callable[..., Any], layer: Any, x: Any, topk_output: Any, config: Any
) -> Any:
    """Run the kernel on the choices whose expert this rank has, as rows of one choice each."""
    import torch

    weights, ids, _ = topk_output
    tokens, choices = (ids >= 0).nonzero(as_tuple=True)
    if len(tokens) == ids.numel():
        return original(layer, x, topk_output, config)
    outputs = torch.zeros_like(x)
    if len(tokens):
        rows = topk_output._replace(
            topk_weights=weights[tokens, choices, None], topk_ids=ids[tokens, choices, None]
        )
        outputs.index_add_(0, tokens, original(layer, x[tokens], rows, config))
    return outputs


def apply_fp8(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Dequantise the experts of a layer, then run SGLang's torch kernel."""
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x, topk_output = dispatch_output.hidden_states, dispatch_output.topk_output
    experts = SimpleNamespace(num_experts=layer.num_experts)
    for name in ("w13_weight", "w2_weight"):
        weight, scale = getattr(layer, name), getattr(layer, f"{name}_scale_inv")
        for dim, size in enumerate(method.weight_block_size, start=1):
            scale = scale.repeat_interleave(size, dim)
        _, rows, columns = weight.shape
        setattr(experts, name, (weight.float() * scale[:, :rows, :columns]).to(x.dtype))
    outputs = moe_forward_native(experts, x, topk_output, method.moe_runner_config)
    return StandardCombineInput(hidden_states=outputs)
