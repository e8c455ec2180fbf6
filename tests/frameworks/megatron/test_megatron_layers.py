"""A balanced MoE layer computes what Megatron-Core's own computes: outputs and all gradients."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from megatron_models import HIDDEN, difference, make_layer, on_ranks, settings
from ranks import shared_pool

CASES = {
    "as it is": {},
    "shared experts": {"moe_shared_expert_intermediate_size": 40},
    "gelu": {"gated_linear_unit": False, "activation_func": F.gelu},
    "clamped": {"activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
    "biases": {"add_bias_linear": True},
    "fused activation": {"bias_activation_fusion": True},
    "dropped tokens": {"moe_expert_capacity_factor": 0.8},
    "dropped by position": {
        "moe_expert_capacity_factor": 0.8,
        "moe_token_drop_policy": "position",
    },
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5},
    "expert bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
    },
    "probabilities on inputs": {"moe_router_topk": 1, "moe_apply_probs_on_input": True,
                                "moe_router_pre_softmax": True},
    "four choices": {"moe_router_topk": 4},
    "one expert a rank": {"num_moe_experts": 2, "moe_router_topk": 1,
                          "moe_router_pre_softmax": True},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "forced balance": {"moe_router_force_load_balancing": True},
}


def batch(rank, dtype):
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(12, 3, HIDDEN, generator=draw, dtype=torch.float64).to(dtype)
    return x.requires_grad_()


def passed(layer, rank, dtype):
    """Output, gradients, and what was planned."""
    x = batch(rank, dtype)
    y, _ = layer(x)
    (y.square().sum() / 100).backward()
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    return {"output": y.detach(), "input": x.grad, **gradients}


@on_ranks
def compare(changes, options, dtype, grouped):
    rank = torch.distributed.get_rank()
    config = settings(params_dtype=dtype, **changes)
    results = []
    for choice in (None, options):
        torch.cuda.manual_seed(rank)
        layer = make_layer(config, choice, grouped=grouped)
        from megatron.core.tensor_parallel import random
        random.get_cuda_rng_tracker().reset()
        random.model_parallel_cuda_manual_seed(7)
        results.append(passed(layer, rank, dtype))
    plain, ours = results
    assert plain.keys() == ours.keys()
    found = {name: difference(plain[name], ours[name]) for name in plain}
    return found, layer.last_plan.to_host().num_replicas


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_the_library(case):
    args = {"expert_model_parallel_size": 2}, CASES[case], {}, torch.float32, False
    for found, copies in shared_pool().run(2, compare, *args):
        print(case, copies, found)
        assert max(found.values()) < 1e-5, found
