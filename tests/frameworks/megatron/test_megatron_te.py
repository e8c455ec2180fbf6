"""TEGroupedMLP, balanced and unmodified: Transformer Engine's own Python, its compiled part on CPUs.

Every gemm of the stand-in checks its arguments, and spare slots are further gemms.
"""

import pytest
import te_on_cpu
import torch
from megatron_models import HIDDEN, difference, make_layer, on_megatron, seed, settings

pytestmark = pytest.mark.skipif(
    not te_on_cpu.available(), reason="make build/transformer-engine/.ready"
)
CASES = {
    "swiglu": {},
    "biases": {"add_bias_linear": True, "bias_dropout_fusion": False},
    "fused activation": {"bias_activation_fusion": True},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "recompute of activations": {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe_act"],
    },
    "one expert a rank": {
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "num_moe_experts": 2,
    },
}


def te_settings(dtype=torch.float32, **changes):
    return settings(
        params_dtype=dtype, bf16=dtype is torch.bfloat16, moe_grouped_gemm=True, **changes
    )


def rows_of_rank(dtype, microbatch=0, width=HIDDEN):
    draw = torch.Generator().manual_seed(10 * microbatch + torch.distributed.get_rank())
    x = torch.randn(12, 3, width, generator=draw, dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def forward_backward(layer, dtype):
    seed()
    x = rows_of_rank(dtype)
    y, _ = layer(x)
    (y.square().sum() / 100).backward()
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    return {"output": y.detach(), "input": x.grad, **gradients}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("slots", [1, 3])
@on_megatron(2, te=True, expert_model_parallel_size=2)
def test_outputs_and_gradients(case, slots):
    config = te_settings(**CASES[case])
    layers = [make_layer(config, options, use_te=True) for options in (None, {"slots": slots})]
    plain, ours = (forward_backward(layer, torch.float32) for layer in layers)
    differences = {name: difference(plain[name], ours[name]) for name in plain}
    assert plain.keys() == ours.keys()
    assert layers[1].last_plan.to_host().num_replicas > 0
    assert max(differences.values()) < 1e-5, differences
