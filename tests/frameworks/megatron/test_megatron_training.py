"""Training of balanced and unmodified models: DDP, optimizers and pipeline schedules."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from megatron_models import (
    LENGTH,
    ROWS,
    VOCABULARY,
    difference,
    make_model,
    on_megatron,
    seed,
    settings,
)

STEPS, MICROBATCHES = 2, 4
PIPELINE = {
    "pipeline_model_parallel_size": 2,
    "pipeline_dtype": torch.float32,
    "batch_p2p_comm": False,
}
INTERLEAVED = PIPELINE | {"virtual_pipeline_model_parallel_size": 2, "num_layers": 4}
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 4000}
DISTRIBUTED = {"use_distributed_optimizer": True}
GATHERED = {"overlap_param_gather": True}
CASES = {
    "DDP": ({}, {}),
    "overlap": ({}, OVERLAP),
    "average in the collective": ({}, {"average_in_collective": True}),
    "distributed optimizer": ({}, DISTRIBUTED),
    "distributed optimizer, overlap": ({}, DISTRIBUTED | OVERLAP),
    "weights gathered in forward": ({}, DISTRIBUTED | OVERLAP | GATHERED),
    "recompute of experts": (
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        OVERLAP,
    ),
    "recompute of all": (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        OVERLAP,
    ),
    "dense layers between": ({"num_layers": 3, "moe_layer_freq": [1, 0, 1]}, OVERLAP),
    "losses of tokens": ({"calculate_per_token_loss": True}, {}),
    "dropped tokens": ({"moe_expert_capacity_factor": 0.8}, DISTRIBUTED),
    "gradients added in place": ({"gradient_accumulation_fusion": True}, OVERLAP),
    "forced balance": ({"moe_router_force_load_balancing": True}, {}),
}


def batches(step):
    """Yield the tokens of this rank's microbatches, with skewed frequencies."""
    from megatron.core import parallel_state

    draw = torch.Generator().manual_seed(100 * step + parallel_state.get_data_parallel_rank())
    while True:
        yield (torch.rand(ROWS, LENGTH, generator=draw) ** 3 * VOCABULARY).long()


def forward_step(tokens, model):
    ids = next(tokens)
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    causal_mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    losses = model(ids, positions, causal_mask, labels=ids.roll(-1, 1))

    def loss_of_microbatch(losses):
        if model.config.calculate_per_token_loss:
            return losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), losses.sum()
        return losses.mean(), losses.detach().mean()

    return losses, loss_of_microbatch


class Training:
    def __init__(self, config, ddp, options):
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        config.finalize_model_grads_func = finalize_model_grads
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp)
        self.chunks = [
            DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(make_model(config, options))
        ]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                clip_grad=0.1,
                use_distributed_optimizer=ddp_config.use_distributed_optimizer,
                overlap_param_gather=ddp_config.overlap_param_gather,
            ),
            self.chunks,
        )

    def step(self, number, microbatches=MICROBATCHES):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[batches(number) for _ in self.chunks],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=microbatches,
            seq_length=LENGTH,
            micro_batch_size=ROWS,
            forward_only=False,
        )
        gradients = {f"gradient of {name}": p.main_grad.clone() for name, p in self.parameters()}
        successful, norm, _ = self.optimizer.step()
        assert successful
        return {"losses": torch.tensor(losses), "norm": torch.tensor(norm), **gradients}

    def parameters(self):
        return [
            (f"{index} {name}", p)
            for index, chunk in enumerate(self.chunks)
            for name, p in chunk.named_parameters()
        ]

    def weights(self):
        return {name: p.detach().clone() for name, p in self.parameters()}


def add_in_place(rows, gradient, total):
    """Compute like the extension of Apex for gradient_accumulation_fusion, which needs a GPU."""
    total.add_(gradient.T @ rows)


def check(changes, ddp, options, steps=STEPS):
    """Compare losses, gradients, norms and weights of some steps with the library's."""
    from megatron.core.tensor_parallel import layers

    from ultraep.integrations.megatron import balancers

    stand_in = SimpleNamespace(wgrad_gemm_accum_fp32=add_in_place)
    with (
        patch.object(layers, "_grad_accum_fusion_available", True),
        patch.object(layers, "fused_weight_gradient_mlp_cuda", stand_in, create=True),
    ):
        plain, _ = train(changes, ddp, None, steps)
        ours, training = train(changes, ddp, options, steps)
    differences = [
        max(difference(expected[name], actual[name]) for name in expected if expected[name].numel())
        for expected, actual in zip(plain, ours, strict=True)
    ]
    assert differences[0] == 0  # initial weights
    assert differences[1] < 1e-5, differences
    assert max(differences) < 1e-4, differences  # Adam first divides by small numbers
    (balancer,) = balancers(training.chunks)
    assert balancer.stats()["copies"] > 0


def train(changes, ddp, options, steps):
    seed()
    training = Training(settings(**changes), ddp, options)
    results = [training.weights(), *(training.step(i) for i in range(steps)), training.weights()]
    return results, training


@pytest.mark.parametrize("case", CASES)
@on_megatron(2, expert_model_parallel_size=2)
def test_training(case):
    check(*CASES[case], {})


@on_megatron(2, expert_model_parallel_size=2)
def test_losses_of_twenty_steps():
    """Allow the difference that flipping the last bit of some weights causes in the library."""

    def losses(options, flipped=False):
        seed()
        training = Training(settings(), {}, options)
        if flipped:  # one weight in a thousand
            for _, parameter in training.parameters():
                few = parameter.data.view(-1)[::1000]
                few.copy_(torch.nextafter(few, few + 1))
        return torch.stack([training.step(index, 1)["losses"] for index in range(20)])

    plain, other = losses(None), losses(None, flipped=True)
    assert plain[-1].mean() < plain[0].mean() - 0.02  # it learns
    assert difference(plain, losses({"policy": "none"})) == 0
    assert difference(plain, losses({})) <= max(2 * difference(plain, other), 1e-6)


@pytest.mark.parametrize("case", ["overlap", "weights gathered in forward"])
@on_megatron(4, expert_model_parallel_size=2)
def test_two_groups_have_the_same_experts(case):
    """The library averages the gradients of experts over both groups."""
    check(*CASES[case], {})


@on_megatron(4, pipeline_model_parallel_size=2, expert_model_parallel_size=2)
def test_pipeline_parallelism():
    check(PIPELINE, DISTRIBUTED | OVERLAP, {})


@on_megatron(
    4,
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
    expert_model_parallel_size=2,
)
def test_interleaved_pipeline():
    check(INTERLEAVED, DISTRIBUTED | OVERLAP, {})
