"""A small model around a layer, trained on any number of ranks, or in one process without ranks.

All ranks together always see the same tokens. The loss of a rank is the mean over its tokens; the
loss of the job is the mean over the ranks.
"""

import warnings
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from dense import Example, assert_close
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ultraep import Balancer, parallel

SHARDS = 12  # divides evenly among 1, 2, 3 and 4 ranks
LARGEST_NORM = 0.05  # below the norm of every step
EXAMPLE = Example([6] * SHARDS, bias=True, shared_ffn=4)
# Uneven and unordered; of three ranks, one has no experts.
HOMES = {1: [0] * 8, 2: [1, 0, 0, 0, 1, 0, 1, 0], 3: [0, 2, 0, 0, 2, 0, 2, 0], 4: [3, 2, 1, 0] * 2}


class Model(nn.Module):
    def __init__(self, moe):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(16, 16, dtype=torch.float64)
        self.moe = moe
        self.after = nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x):
        return self.after(x + self.moe(torch.tanh(self.before(x))))


def grid(ep):
    rows = np.arange(dist.get_world_size()).reshape(-1, ep)
    experts, _ = dist.new_subgroups_by_enumeration(rows.tolist())
    dp_replicas, _ = dist.new_subgroups_by_enumeration(rows.T.tolist())
    return experts, dp_replicas


def balanced(group, experts=EXAMPLE.experts):
    return Model(EXAMPLE.layer(Balancer(group, experts=experts)))


def wrapped(wrapper, model, dp_replicas):
    if wrapper == "ddp":
        return parallel.data_parallel(model)
    world = init_device_mesh("cpu", (dist.get_world_size(),))
    if wrapper == "fsdp":
        own = set(parallel.expert_parameters(model).values())
        return fully_shard(model, mesh=world, ignored_params=own)
    assert wrapper == "fsdp, experts too"
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    for dense in (model.moe.router, model.moe.shared):
        fully_shard(dense, mesh=world)
    fully_shard(model.moe, mesh=DeviceMesh.from_group(dp_replicas, "cpu"))
    return fully_shard(model, mesh=world)


class Training:
    def __init__(self, wrapper, ep):
        experts, self.dp_replicas = grid(ep)
        self.bare = balanced(experts, HOMES[ep])
        self.model = wrapped(wrapper, self.bare, self.dp_replicas)
        self.optimizer = adam(self.model)
        rank, size = dist.get_rank(), dist.get_world_size()
        self.x = torch.cat(EXAMPLE.inputs).chunk(size)[rank]

    def backward(self):
        """Compute the gradients and return the loss of the job."""
        self.optimizer.zero_grad()
        loss = self.model(self.x).square().mean()
        loss.backward()
        parallel.average_expert_gradients(self.model, self.dp_replicas)
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def steps(self, count):
        history = []
        for _ in range(count):
            loss = self.backward()
            norm = parallel.clip_grad_norm(self.model, LARGEST_NORM)
            self.optimizer.step()
            history.append((loss, norm.item()))
        return history

    def state(self):
        return {"training": parallel.ShardedState(self.model, self.optimizer)}

    def full_gradients(self):
        """Return the gradients of dense parameters and of the home experts, by name."""
        gradients = ((name, p.grad) for name, p in self.bare.named_parameters())
        return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients}


@cache
def reference(steps):
    """Train without ranks; return losses and norms, and the gradients of the first step."""
    twin = Model(EXAMPLE.twin())
    optimizer, history, first = adam(twin), [], {}
    for _ in range(steps):
        optimizer.zero_grad()
        loss = twin(torch.cat(EXAMPLE.inputs)).square().mean()
        loss.backward()
        first = first or {n: p.grad.clone() for n, p in twin.named_parameters()}
        norm = nn.utils.clip_grad_norm_(twin.parameters(), LARGEST_NORM)
        optimizer.step()
        history.append((loss.item(), norm.item()))
    assert min(norm for _, norm in history) > LARGEST_NORM
    return history, {n.replace("weights.", "").replace("/", "."): g for n, g in first.items()}


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def assert_same_history(*histories):
    assert_close(*(torch.tensor(h, dtype=torch.float64) for h in histories), tolerance=1e-10)
