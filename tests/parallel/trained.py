"""A small model around a layer, trained on any number of ranks and as one process without ranks.

All ranks together see the same tokens, however many they are. The loss of a rank is the mean over
its tokens, that of the job the mean over the ranks.
"""

from __future__ import annotations

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

SHARDS = 12  # of the tokens: they divide evenly among 1, 2, 3 and 4 ranks
LARGEST_NORM = 0.05  # less than that of any step
EXAMPLE = Example([6] * SHARDS, bias=True, shared_ffn=4)
# Neither even nor in order; of three ranks one has none.
HOMES = {1: [0] * 8, 2: [1, 0, 0, 0, 1, 0, 1, 0], 3: [0, 2, 0, 0, 2, 0, 2, 0], 4: [3, 2, 1, 0] * 2}


class Model(nn.Module):
    """Dense layers around experts."""

    def __init__(self, moe):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(16, 16, dtype=torch.float64)
        self.moe = moe
        self.after = nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x):
        return self.after(x + self.moe(torch.tanh(self.before(x))))


def grid(ep):
    """The group that has every expert once, and the group that has the same experts."""
    rows = np.arange(dist.get_world_size()).reshape(-1, ep)
    experts, _ = dist.new_subgroups_by_enumeration(rows.tolist())
    dp_replicas, _ = dist.new_subgroups_by_enumeration(rows.T.tolist())
    return experts, dp_replicas


def balanced(group, homes=None):
    """The model of one rank of an expert-parallel group."""
    return Model(EXAMPLE.layer(Balancer(group, experts=8, homes=homes)))


def wrapped(way, model, dp_replicas):
    """The model in the hands of what averages its dense gradients."""
    if way == "ddp":
        return parallel.data_parallel(model)
    world = init_device_mesh("cpu", (dist.get_world_size(),))
    if way == "fsdp":
        own = set(parallel.expert_parameters(model).values())
        return fully_shard(model, mesh=world, ignored_params=own)
    assert way == "fsdp, experts too"
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    for dense in (model.moe.router, model.moe.shared):
        fully_shard(dense, mesh=world)
    fully_shard(model.moe, mesh=DeviceMesh.from_group(dp_replicas, "cpu"))
    return fully_shard(model, mesh=world)


class Training:
    """One rank of it."""

    def __init__(self, way, ep):
        experts, self.dp_replicas = grid(ep)
        self.bare = balanced(experts, HOMES[ep])
        self.model = wrapped(way, self.bare, self.dp_replicas)
        self.optimizer = adam(self.model)
        rank, size = dist.get_rank(), dist.get_world_size()
        self.x = torch.cat(EXAMPLE.inputs).chunk(size)[rank]

    def backward(self):
        """The loss of the job; leaves its gradients."""
        self.optimizer.zero_grad()
        loss = self.model(self.x).square().mean()
        loss.backward()
        parallel.average_expert_gradients(self.model, self.dp_replicas)
        told = loss.detach().clone()
        dist.all_reduce(told)
        return told.item() / dist.get_world_size()

    def steps(self, count):
        """Losses and norms of so many steps."""
        told = []
        for _ in range(count):
            loss = self.backward()
            norm = parallel.clip_grad_norm(self.model, LARGEST_NORM)
            self.optimizer.step()
            told.append((loss, norm.item()))
        return told

    def state(self):
        return {"training": parallel.ShardedState(self.model, self.optimizer)}

    def whole_gradients(self):
        """By name, on this rank; of experts, those at home here."""
        found = ((name, p.grad) for name, p in self.bare.named_parameters())
        return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found}


@cache
def reference(steps):
    """Without ranks: losses and norms of so many steps, and the gradients of the first."""
    twin = Model(EXAMPLE.twin())
    optimizer, told, first = adam(twin), [], {}
    for _ in range(steps):
        optimizer.zero_grad()
        loss = twin(torch.cat(EXAMPLE.inputs)).square().mean()
        loss.backward()
        first = first or {n: p.grad.clone() for n, p in twin.named_parameters()}
        norm = nn.utils.clip_grad_norm_(twin.parameters(), LARGEST_NORM)
        optimizer.step()
        told.append((loss.item(), norm.item()))
    assert min(norm for _, norm in told) > LARGEST_NORM
    return told, {n.replace("weights.", "").replace("/", "."): g for n, g in first.items()}


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def assert_told(found, wanted):
    assert len(found) == len(wanted)
    found, wanted = (torch.tensor(told, dtype=torch.float64) for told in (found, wanted))
    assert_close(found, wanted, tolerance=1e-10)
