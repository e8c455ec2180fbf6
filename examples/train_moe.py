"""Train a small MoE language model on bytes, balancing every microbatch of every layer.

    torchrun --nproc-per-node 2 examples/train_moe.py
    torchrun --nproc-per-node 2 examples/train_moe.py --policy none      # without balancing

The experts are spread over the ranks. DistributedDataParallel replicates the rest of the model and
averages its gradients. Gradients of experts are already sums over all tokens of the group;
`average_expert_gradients` divides them by the number of ranks.
"""

from __future__ import annotations

import argparse
import time
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist

import ultraep
from ultraep import parallel
from ultraep.topology import even_homes
from ultraep_tools.demo.model import ModelConfig, TinyMoE, next_byte_loss
from ultraep_tools.demo.text import Text

TOKENS, LENGTH = 1024, 64  # tokens per rank and step; sequence length
PERIOD = 20  # steps until the subject of the text changes, and with it the load of the experts


def batch(text: Text, step: int) -> torch.Tensor:
    """Return `[B, T + 1]` sequences: every rank has another text of the same subject."""
    rng = np.random.default_rng([step, dist.get_rank()])
    subjects = text.subjects_at(rng, step, TOKENS // LENGTH, PERIOD)
    return text.sequences(rng, subjects, LENGTH + 1)


def train(options: argparse.Namespace, balancer: ultraep.Balancer) -> None:
    text, config = Text(), ModelConfig(experts=options.experts)
    model = TinyMoE(config, balancer)  # its MLPs are ultraep.BalancedMoE.swiglu(...)
    wrapped = parallel.data_parallel(model)  # DistributedDataParallel, without the experts
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = next_byte_loss(wrapped, batch(text, step))
        plans = model.last_plans()
        loss.backward()
        parallel.average_expert_gradients(model)
        parallel.clip_grad_norm(model, 1.0)
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        if balancer.rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            before = fmean(plan.initial_imbalance for plan in plans)
            after = fmean(plan.imbalance for plan in plans)
            speed = dist.get_world_size() * TOKENS / (time.perf_counter() - begin)
            print(
                f"step {step:4}   loss {mean.item() / dist.get_world_size():.4f}   "
                f"{speed:,.0f} tokens/s   imbalance {before:.2f} -> {after:.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--experts", type=int, default=16, help="experts of a layer")
    parser.add_argument("--slots", type=int, default=1, help="spare slots per rank")
    parser.add_argument("--policy", choices=ultraep.policy_names(), default="ultraep")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    balancer = ultraep.Balancer(
        dist.new_group(),  # separate from the messages of DistributedDataParallel
        experts=even_homes(options.experts, dist.get_world_size()),
        slots=options.slots,
        # These experts are so small that replicas save no time: plan for balance instead.
        config=ultraep.BalanceConfig(policy=options.policy, objective="balance"),
    )
    train(options, balancer)
    if balancer.rank == 0:
        stats = balancer.stats()
        print("imbalance {imbalance_before:.3f} -> {imbalance_after:.3f}".format(**stats))
    balancer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
