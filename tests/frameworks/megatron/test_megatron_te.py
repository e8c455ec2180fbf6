"""TEGroupedMLP, balanced and unmodified, on Transformer Engine's own Python (`te_on_cpu.py`).

Every gemm of the stand-in checks its arguments, and spare slots are further gemms.
"""

import pytest
import te_on_cpu
import torch
from megatron_models import (
    difference,
    forward_backward,
    make_layer,
    on_megatron,
    rows_of_rank,
    settings,
)

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
    "fused permutations": {"moe_permute_fusion": True},
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


@pytest.mark.parametrize("case", CASES)
@on_megatron(2, te=True, expert_model_parallel_size=2)
def test_outputs_and_gradients(case):
    config = te_settings(**CASES[case])
    layers = [make_layer(config, options, use_te=True) for options in (None, {"slots": 2})]
    plain, ours = (forward_backward(layer) for layer in layers)
    differences = {name: difference(plain[name], ours[name]) for name in plain}
    assert plain.keys() == ours.keys()
    assert layers[1].last_plan.to_host().num_replicas > 0
    assert max(differences.values()) < 1e-5, differences


class Ddp:
    """Adds gradients to `main_grad` as DistributedDataParallel of Megatron-Core does."""

    def __init__(self, layer):
        self.layer, self.order = layer, []
        for name, parameter in layer.named_parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self.add(name, p))

    def add(self, name, parameter):
        self.order.append(name)
        if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        # A bucket may be reduced now: what is added later must not count.
        parameter.reduced = parameter.main_grad.clone()

    def step(self, dtype, microbatches=3):
        for parameter in self.layer.parameters():
            parameter.main_grad.zero_()
        self.layer.set_is_first_microbatch()
        outputs = []
        for microbatch in range(microbatches):
            for parameter in self.layer.parameters():
                parameter.grad_added_to_main_grad = False
            x = rows_of_rank(dtype, microbatch, self.layer.config.hidden_size)
            y, _ = self.layer(x)
            (y.float().square().sum() / 100).backward()
            outputs += [y.detach().float(), x.grad.float()]
        gradients = {name: p.reduced for name, p in self.layer.named_parameters()}
        return {f"microbatch {i}": y for i, y in enumerate(outputs)} | gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_out", [False, True])
@on_megatron(2, te=True, expert_model_parallel_size=2)
def test_gradients_are_added_to_main_grad(dtype, zero_out):
    """Gradients of replicas reach `main_grad` before the hook of DDP sees the parameter."""
    config = te_settings(dtype, gradient_accumulation_fusion=True)
    results, layers = [], [make_layer(config, o, use_te=True) for o in (None, {"slots": 2})]
    for layer in layers:
        for parameter in layer.experts.parameters():
            parameter.zero_out_wgrad = zero_out
        ddp = Ddp(layer)
        results.append([ddp.step(dtype), ddp.step(dtype)])
        assert len(ddp.order) == 6 * len(list(layer.parameters()))
    assert layers[1].balancer.stats()["copies"] > 0
    limit = 1e-5 if dtype is torch.float32 else 2e-2
    for plain, ours in zip(*results, strict=True):
        differences = {name: difference(plain[name], ours[name]) for name in plain}
        assert max(differences.values()) < limit, differences


@on_megatron(2, te=True, expert_model_parallel_size=2)
def test_fused_accumulation_needs_main_grad():
    from ultraep import ConfigError

    layer = make_layer(te_settings(gradient_accumulation_fusion=True), {}, use_te=True)
    with pytest.raises(ConfigError, match="needs `main_grad`"):
        layer(rows_of_rank(torch.float32))


@pytest.mark.parametrize("recompute", [None, "moe", "moe_act"])
@on_megatron(2, te=True, expert_model_parallel_size=2)
def test_fp8(recompute):
    """Outputs are equal bit by bit; a replica quantised in an earlier step would show."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling

    of_te = Float8BlockScaling()
    fp8 = {"fp8": "e4m3", "fp8_recipe": "blockwise", "gradient_accumulation_fusion": True}
    if recompute:
        fp8 |= {"recompute_granularity": "selective", "recompute_modules": [recompute]}
    sizes = {"hidden_size": 128, "moe_ffn_hidden_size": 128, "ffn_hidden_size": 128}
    config = te_settings(torch.bfloat16, **fp8, **sizes)
    results, layers = [], [make_layer(config, o, use_te=True) for o in (None, {"slots": 2})]
    for layer in layers:
        ddp, steps = Ddp(layer), []
        for _ in range(3):
            with te.fp8_autocast(enabled=True, fp8_recipe=of_te):
                steps.append(ddp.step(torch.bfloat16, microbatches=2))
            with torch.no_grad():  # weights change, so that stale caches differ
                for parameter in layer.experts.parameters():
                    parameter.mul_(-1)
        results.append(steps)
    caches = layers[1]._adapter._wide["linear_fc1"]._twin._fp8_workspaces
    assert set(caches) == {f"weight{index}" for index in range(6)}  # and quantised weights
    assert layers[1].balancer.stats()["copies"] > 0
    for plain, ours in zip(*results, strict=True):
        for name in plain:
            if name.startswith("microbatch"):
                assert torch.equal(plain[name], ours[name]), name
        differences = {name: difference(plain[name], ours[name]) for name in plain}
        assert max(differences.values()) < 0.1, differences  # columns are quantised in other blocks
