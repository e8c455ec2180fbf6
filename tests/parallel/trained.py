"""A small model around a layer, and what its gradients must be: those of one process.

The loss of a rank is a mean over its tokens; the loss of the job is the mean over the ranks.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from dense import Example
from torch import nn

from ultraep import Balancer

EXPERTS, TOKENS = 8, 24
HOMES = {1: [0] * 8, 2: [1, 0, 0, 0, 1, 0, 1, 0], 3: [0, 2, 0, 0, 2, 0, 2, 0], 4: [3, 2, 1, 0] * 2}


def example(ranks):
    """Weights that do not depend on the number of ranks, tokens of each."""
    return Example([TOKENS] * ranks, experts=EXPERTS, bias=True, shared_ffn=4)


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


def balanced(ranks, group, **options):
    """The model on one rank of a group, whose tokens are those of `ranks` ranks."""
    options = {"experts": EXPERTS, "homes": HOMES[group.size()], **options}
    return Model(example(ranks).layer(Balancer(group, **options)))


def loss_of(model, x):
    return model(x).square().mean()


def grid(ep):
    """The group that has every expert once, and the group that has the same experts."""
    rows = np.arange(dist.get_world_size()).reshape(-1, ep)
    experts, _ = dist.new_subgroups_by_enumeration(rows.tolist())
    replicas, _ = dist.new_subgroups_by_enumeration(rows.T.tolist())
    return experts, replicas


def reference(ranks):
    """The gradients of the job, by the names that the model has; and their norm."""
    drawn = example(ranks)
    twin = Model(drawn.twin())
    sum(loss_of(twin, x) / ranks for x in drawn.inputs).backward()
    found = {
        name.replace("weights.", "").replace("/", "."): parameter.grad
        for name, parameter in twin.named_parameters()
    }
    norm = torch.stack([gradient.norm() for gradient in found.values()]).norm()
    return found, norm
