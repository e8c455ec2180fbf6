"""Outputs and gradients of a balanced MoE layer equal the results of Megatron-Core's layer."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from megatron_models import difference, forward_backward, make_layer, on_megatron, settings

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


def compare(changes, options, dtype=torch.float32):
    config = settings(params_dtype=dtype, **changes)
    layers = [make_layer(config, choice) for choice in (None, options)]
    plain, ours = (forward_backward(layer, dtype) for layer in layers)
    assert plain.keys() == ours.keys()
    differences = {name: difference(plain[name], ours[name]) for name in plain}
    return differences, layers[1].last_plan.to_host().num_replicas


def check(changes, options, least=1):
    differences, replicas = compare(changes, options)
    assert replicas >= least
    assert max(differences.values()) < 1e-5, differences


@pytest.mark.parametrize("case", CASES)
@on_megatron(2, expert_model_parallel_size=2)
def test_outputs_and_gradients(case):
    check(CASES[case], {})


@pytest.mark.parametrize("slots", [2, 3])
@on_megatron(2, expert_model_parallel_size=2)
def test_more_slots(slots):
    check({}, {"slots": slots})


@on_megatron(4, expert_model_parallel_size=4)
def test_four_ranks():
    check({"expert_model_parallel_size": 4}, {}, least=2)


TENSOR_PARALLEL = {
    "tensor_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
}


@on_megatron(2, **TENSOR_PARALLEL)
def test_tensor_parallel_attention():
    """Sequence parallelism gives each rank its own tokens in the MoE layer."""
    check(TENSOR_PARALLEL | {"sequence_parallel": True}, {})


@pytest.mark.parametrize("changes", [{}, {"moe_shared_expert_intermediate_size": 40}])
@on_megatron(2, expert_model_parallel_size=2)
def test_without_replicas_all_bits_are_equal(changes):
    differences, replicas = compare(changes, {"policy": "none"})
    assert replicas == 0
    assert not any(differences.values()), differences


@on_megatron(2, expert_model_parallel_size=2)
def test_double_precision():
    """The library's routers compute in single precision."""
    differences, replicas = compare({"moe_router_dtype": "fp64"}, {}, torch.float64)
    assert replicas > 0
    routed = {name: differences.pop(name) for name in ("input 0", "router.weight")}
    assert max(differences.values()) < 1e-12, differences
    assert max(routed.values()) < 1e-7, routed


@on_megatron(2, expert_model_parallel_size=2)
def test_the_first_rank_logs_a_line():
    from ultraep.integrations import common

    layers = [make_layer(settings(), {"slots": 2}) for _ in range(2)]
    with patch.object(common.logger, "info") as info:
        for layer in layers * 2:
            forward_backward(layer, torch.float32)
    lines = [call.args[0] for call in info.call_args_list]
    expected = ["ultraep: 2 of 2 MoE layers balanced (messages plane, 2 slots)"]
    assert lines == expected * (torch.distributed.get_rank() == 0)


@on_megatron(1)
def test_a_rank_alone_runs_the_layer_of_the_library():
    """A subscriber of the balancer needs the stages."""
    config = settings(expert_model_parallel_size=1, moe_shared_expert_intermediate_size=40)
    plain, layer = make_layer(config, None), make_layer(config, {})
    wanted, results = forward_backward(plain), forward_backward(layer)
    assert layer.last_plan is None
    assert all(torch.equal(results[name], wanted[name]) for name in wanted)
    layer.balancer.subscribe(lambda _: None)
    layer.zero_grad()
    results = forward_backward(layer)
    assert layer.last_plan is not None
    assert max(difference(wanted[name], results[name]) for name in wanted) < 1e-5
