"""The whole layer in real processes: beside DDP, and when a rank dies."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from ranks import PATIENCE, TIMED_OUT, meet, shared_pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ultraep import BalancedMoE, Balancer, CommunicationError


class Model(nn.Module):
    """A layer between two others, which are the same on all ranks."""

    def __init__(self, balancer):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.moe = BalancedMoE.swiglu(16, 12, 8, 2, balancer=balancer)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)) + self.moe(torch.relu(self.first(x))))


def losses_beside_ddp(rank, group, policy, steps):
    balancer = Balancer(group, experts=8, slots=4, policy=policy, timeout=PATIENCE)
    model = Model(balancer)
    experts = [f"moe.experts.{name}" for name, _ in model.moe.experts.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
    wrapped = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 8, generator=generator)
        loss = (wrapped(x) - x[:, :4].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.moe.experts.parameters():
            parameter.grad /= group.size()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        losses.append(total.item() / group.size())
    stats = balancer.stats()
    balancer.close()
    return losses, stats["imbalance_before"], stats["imbalance_after"]


def test_training_beside_ddp_is_the_same_balanced_or_not():
    runs = {p: shared_pool().run(2, losses_beside_ddp, p, 60) for p in ("none", "ultraep")}
    plain, balanced = runs["none"][0][0], runs["ultraep"][0][0]
    assert balanced == pytest.approx(plain, rel=1e-3)
    assert balanced[-1] < balanced[0] / 2
    _, before, after = runs["ultraep"][0]
    assert after < before
    assert after == pytest.approx(1.0, abs=0.02)


def dies_in_the_middle(rank, group, folder):
    balancer = Balancer(group, experts=9, slots=1, timeout=PATIENCE)
    layer = BalancedMoE.swiglu(16, 12, 9, 2, balancer=balancer)
    x = torch.randn(16, 16, requires_grad=True)
    layer(x).sum().backward()
    y = layer(x)
    meet(folder, rank, 3)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommunicationError) as caught:
        y.sum().backward()
    return str(caught.value)


def test_a_rank_that_dies_stops_the_others_in_backward(tmp_path):
    ended = shared_pool().outcomes(3, dies_in_the_middle, tmp_path)
    actual = {outcome.rank: outcome for outcome in ended}
    assert actual[1].kind == "lost"
    for rank in (0, 2):
        assert actual[rank].kind == "result", actual[rank].value
        assert "\n" not in actual[rank].value
        assert "rank 1" in actual[rank].value
        assert not TIMED_OUT.search(actual[rank].value)
