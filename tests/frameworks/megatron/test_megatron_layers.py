"""A balanced MoE layer computes what Megatron-Core's own computes: outputs and all gradients."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from megatron_models import HIDDEN, difference, make_layer, on_ranks, settings
from ranks import shared_pool

ONE = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
DROPPED = {"moe_expert_capacity_factor": 0.8}
PADDED = DROPPED | {"moe_pad_expert_input_to_capacity": True}
ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5}
CASES = {
    "allgather": {},
    "alltoall": ALL_TO_ALL,
    "shared experts": {"moe_shared_expert_intermediate_size": 40},
    "gated shared expert": {
        "moe_shared_expert_intermediate_size": 40,
        "moe_shared_expert_gate": True,
    },
    "gelu": {"gated_linear_unit": False, "activation_func": F.gelu},
    "clamped": {"activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
    "biases": {"add_bias_linear": True},
    "fused activation": {"bias_activation_fusion": True},
    "dropped tokens": DROPPED,
    "dropped by position": DROPPED | {"moe_token_drop_policy": "position"},
    "padded": PADDED | ALL_TO_ALL,
    "padded by position": PADDED | ALL_TO_ALL | {"moe_token_drop_policy": "position"},
    "sigmoid": SIGMOID,
    "expert bias": SIGMOID | {"moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32"},
    "groups of experts": {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    "other losses": {
        "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.1],
        "moe_z_loss_coeff": 0.1,
    },
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
    "probabilities on inputs": ONE | {"moe_apply_probs_on_input": True},
    "four choices": {"moe_router_topk": 4},
    "one expert a rank": ONE | {"num_moe_experts": 2},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "forced balance": {"moe_router_force_load_balancing": True},
}


def batch(dtype):
    draw = torch.Generator().manual_seed(torch.distributed.get_rank())
    x = torch.randn(12, 3, HIDDEN, generator=draw, dtype=torch.float64).to(dtype)
    return x.requires_grad_()


def passed(layer, dtype):
    """Output and all gradients; random numbers begin anew."""
    from megatron.core.tensor_parallel import random

    random.get_cuda_rng_tracker().reset()
    random.model_parallel_cuda_manual_seed(7)
    x = batch(dtype)
    y, _ = layer(x)
    (y.square().sum() / 100).backward()
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    return {"output": y.detach(), "input": x.grad, **gradients}


def grouped_products(rows, weights, counts, trans_b):
    """What the package grouped_gemm computes, on GPUs alone."""
    parts = zip(rows.split(counts.tolist()), weights, strict=True)
    return torch.cat([part @ weight for part, weight in parts])


@on_ranks
def compare(changes, options, dtype=torch.float32, grouped=False):
    from megatron.core.transformer.moe import grouped_gemm_util

    stand_in = SimpleNamespace(ops=SimpleNamespace(gmm=grouped_products))
    config = settings(params_dtype=dtype, bf16=grouped, moe_grouped_gemm=grouped, **changes)
    with (
        patch.object(grouped_gemm_util, "grouped_gemm", stand_in),
        patch.object(grouped_gemm_util, "ops", stand_in.ops, create=True),
    ):
        layers = [make_layer(config, choice, grouped=grouped) for choice in (None, options)]
        plain, ours = (passed(layer, dtype) for layer in layers)
    assert plain.keys() == ours.keys()
    found = {name: difference(plain[name], ours[name]) for name in plain}
    return found, layers[1].last_plan.to_host().num_replicas


def run(*args, ranks=2):
    return shared_pool().run(ranks, compare, {"expert_model_parallel_size": ranks}, *args)


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_the_library(case):
    for found, copies in run(CASES[case], {}):
        assert copies > 0
        assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("options", [{"slots": 2}, {"slots": 3, "relay": "chain"}])
def test_more_slots(options):
    for found, copies in run({}, options):
        assert copies > 0
        assert max(found.values()) < 1e-5, found


def test_four_ranks():
    for found, copies in run({"expert_model_parallel_size": 4}, {}, ranks=4):
        assert copies > 1
        assert max(found.values()) < 1e-5, found


def test_attention_in_parts_beside_whole_experts():
    """Tensor parallelism of all but the experts: each rank has tokens of its own here."""
    parallel = {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }
    changes = parallel | {"sequence_parallel": True}
    for found, copies in shared_pool().run(2, compare, parallel, changes, {}):
        assert copies > 0
        assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("changes", [{}, {"moe_shared_expert_intermediate_size": 40}])
def test_without_copies_there_is_nothing_to_round(changes):
    """Policy "none": the library's own numbers, bit by bit."""
    for found, copies in run(changes, {"policy": "none"}):
        assert copies == 0
        assert not any(found.values()), found


def test_double_precision():
    """Where the library computes in it: its routers are of single precision."""
    for found, copies in run({"moe_router_dtype": "fp64"}, {}, torch.float64):
        assert copies > 0
        routed = {name: found.pop(name) for name in ("input", "router.weight")}
        assert max(found.values()) < 1e-12, found
        assert max(routed.values()) < 1e-7, routed


@pytest.mark.parametrize("case", ["allgather", "gelu", "padded", "recompute"])
@pytest.mark.parametrize("slots", [1, 2])
def test_grouped_experts(case, slots):
    """All experts of a rank in one parameter, with a stand-in for products of the GPU."""
    for found, copies in run(CASES[case], {"slots": slots}, torch.float32, True):
        assert copies > 0
        assert max(found.values()) < 1e-5, found
