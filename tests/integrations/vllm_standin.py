"""A stand-in for vLLM's Triton kernels on CPUs.

It replaces only the compiled part of `TritonExperts` and `TritonWNA16Experts`: their `apply` in
plain torch, with the row semantics of the kernels. Loading, conversion of weights and choice of the
kernel stay vLLM's (`--moe-backend triton`). Any call that the kernels would not accept fails.
"""

from typing import Any

import torch


def register() -> None:
    """Replace the kernels; idempotent."""
    from vllm.model_executor.layers.fused_moe.experts import triton_moe

    for cls in (triton_moe.TritonExperts, triton_moe.TritonWNA16Experts):
        cls._supports_current_device = staticmethod(lambda: True)
        cls._supports_quant_scheme = staticmethod(lambda weight, activation: True)
        cls.expects_unquantized_inputs = property(lambda self: True)
        cls.apply = apply


def apply(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    a1q_scale: torch.Tensor | None,
    a2_scale: torch.Tensor | None,
    workspace13: torch.Tensor,
    workspace2: torch.Tensor,
    expert_tokens_meta: Any,
    apply_router_weight_on_input: bool,
) -> None:
    """Write `[T, D]` outputs; rounds activations like the format of the weights asks for."""
    experts, (tokens, width) = len(w1), hidden_states.shape
    assert activation.value == "silu"
    assert not apply_router_weight_on_input
    assert expert_map is None, "no expert map: all ids are local"
    assert a1q_scale is None
    assert global_num_experts == experts == len(w2)
    assert output.shape == hidden_states.shape
    assert topk_ids.shape == topk_weights.shape
    assert len(topk_ids) == tokens
    assert bool(((topk_ids >= 0) & (topk_ids < experts)).all())
    config = self.quant_config
    sums = torch.zeros(tokens, width, dtype=torch.float64)
    for expert in topk_ids.unique().tolist():
        rows, place = (topk_ids == expert).nonzero(as_tuple=True)
        up = dequantised(w1, config.w1_scale, config.w1_zp, config, expert)
        down = dequantised(w2, config.w2_scale, config.w2_zp, config, expert)
        assert up.shape == (2 * down.shape[1], width)
        assert down.shape[0] == width
        gate, linear = (rounded(hidden_states[rows], config.a1_scale, config) @ up.T).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * linear
        values = rounded(inner, config.a2_scale, config) @ down.T
        sums.index_add_(0, rows, values * topk_weights[rows, place, None].double())
    output.copy_(sums)


def dequantised(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    zeros: torch.Tensor | None,
    config: Any,
    expert: int,
) -> torch.Tensor:
    """Return `[N, K]` weights of one expert in float64."""
    values = weight[expert]
    if config.use_int4_w4a16:
        assert values.dtype == torch.uint8
        assert zeros is None
        values = torch.stack((values & 15, values >> 4), -1).flatten(1).double() - 8
    if scale is None:
        assert values.dtype in (torch.float32, torch.float16, torch.bfloat16)
        return values.double()
    assert len(scale) == len(weight), "one scale per expert"
    factors = scale[expert].double()
    values = values.double()
    if factors.ndim < 2:
        return values * (factors[:, None] if factors.numel() > 1 else factors)
    for dim in range(2):
        repeats = -(-values.shape[dim] // factors.shape[dim])
        factors = factors.repeat_interleave(repeats, dim)[: values.shape[0]]
    return values * factors[:, : values.shape[1]]


def rounded(rows: torch.Tensor, scale: torch.Tensor | None, config: Any) -> torch.Tensor:
    """Return rows as the kernel sees them: quantised to the dtype of the activations and back."""
    values = rows.double()
    dtype = config.quant_dtype
    if dtype is None:
        return values
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    groups = values.unflatten(-1, (-1, group_size(values.shape[-1], config)))
    if scale is not None:  # static
        assert scale.numel() == 1
        scales = scale.double().reshape(1, 1, 1)
    else:
        assert config.per_act_token_quant or config.block_shape, "scales of whole batches differ"
        scales = (groups.abs().amax(-1, keepdim=True) / limit).clamp_min(1e-10)
    values = (groups / scales).clamp(-limit, limit)
    values = values.round() if dtype == torch.int8 else values.float().to(dtype).double()
    return (values * scales).flatten(-2)


def group_size(width: int, config: Any) -> int:
    return config.block_shape[1] if config.block_shape else width
