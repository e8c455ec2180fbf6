"""Train a small MoE GPT with Megatron-Core, unmodified and then balanced.

    torchrun --nproc-per-node 2 examples/megatron_train.py

Megatron-Core builds, shards and trains the model; `balanced` is the one line that differs. Prints
the losses of both runs side by side. The ranks run on CPUs: `on_cpu` replaces CUDA.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling takes longer than this training
warnings.filterwarnings("ignore")  # the library warns about missing packages

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_on_cpu import on_cpu

from ultraep.integrations.megatron import balanced, balancers

VOCABULARY, LENGTH, ROWS, MICROBATCHES = 256, 32, 4, 2


def configured() -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=128,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        expert_model_parallel_size=dist.get_world_size(),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        finalize_model_grads_func=finalize_model_grads,
    )


def build(options: dict[str, Any] | None) -> Any:
    """Return the model under DDP, with these balancer options; None: unmodified."""
    get_cuda_rng_tracker().reset()
    model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    config = configured()
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if options is not None:
        spec = balanced(spec, config, **options)  # the one line
    model = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def batches(step: int) -> Iterator[torch.Tensor]:
    """Yield skewed random tokens of this rank."""
    draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
    while True:
        yield (torch.rand(ROWS, LENGTH + 1, generator=draw) ** 4 * VOCABULARY).long()


def forward_step(tokens: Iterator[torch.Tensor], model: Any) -> Any:
    text = next(tokens)
    places = torch.arange(LENGTH).expand(ROWS, -1)
    later = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    losses = model(text[:, :-1], places, later, labels=text[:, 1:])
    return losses, lambda losses: (losses.mean(), losses.detach().mean())


def train(model: Any, steps: int) -> list[float]:
    """Return the loss of every step, averaged over microbatches and ranks."""
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=3e-3), [model])
    step_losses = []
    for step in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(step),
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=ROWS,
            forward_only=False,
        )
        optimizer.step()
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        step_losses.append(float(mean) / dist.get_world_size())
    return step_losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--slots", type=int, default=1)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    with on_cpu():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
        plain = train(build(None), options.steps)
        model = build({"slots": options.slots})
        ours = train(model, options.steps)
    if dist.get_rank() == 0:
        print("step   unmodified   balanced")
        for step, losses in enumerate(zip(plain, ours, strict=True)):
            print("{:4d}   {:10.6f} {:10.6f}".format(step, *losses))
        stats = balancers(model)[0].stats()
        print("imbalance {imbalance_before:.3f} -> {imbalance_after:.3f}".format(**stats))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
