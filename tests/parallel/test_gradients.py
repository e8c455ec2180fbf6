"""Gradients beside DDP and FSDP2 are those of one process; what would damage experts is refused."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from dense import Example, assert_close
from ranks import shared_pool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trained import HOMES, balanced, example, grid, loss_of, reference

from ultraep import Balancer, ConfigError, LocalGroup, parallel


def assert_reference(model, ranks):
    """The gradients of this rank, whole, are those of the job."""
    wanted, _ = reference(ranks)
    experts = parallel.expert_parameters(model)
    homes = {name: module.home_experts for name, module in parallel.home.home_modules(model).items()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        name = name.removeprefix("module.")
        right = wanted[name]
        if ".experts." in name:
            (mine,) = homes.values()
            right = right[list(mine)]
        assert_close(gradient, right, name)


def with_ddp(rank, group, ep):
    experts, replicas = grid(ep)
    model = parallel.data_parallel(balanced(group.size(), experts))
    loss_of(model, example(group.size()).inputs[rank]).backward()
    parallel.average_expert_gradients(model, replicas)
    assert_reference(model, group.size())
    _, norm = reference(group.size())
    found = parallel.clip_grad_norm(model, norm.item() / 2)
    assert_close(found, norm)
    assert_close(parallel.clip_grad_norm(model, 1e9), norm / 2, tolerance=1e-5)


@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (3, 3), (4, 2), (2, 1)], ids=str)
def test_ddp_gives_the_gradients_and_the_norm_of_one_process(ranks, ep):
    shared_pool().run(ranks, with_ddp, ep)


def with_fsdp(rank, group, ep):
    experts, replicas = grid(ep)
    model = balanced(group.size(), experts)
    mesh = init_device_mesh("cpu", (group.size(),))
    own = set(parallel.expert_parameters(model).values())
    fully_shard(model, mesh=mesh, ignored_params=own)
    loss_of(model, example(group.size()).inputs[rank]).backward()
    parallel.average_expert_gradients(model, replicas)
    assert_reference(model, group.size())
    _, norm = reference(group.size())
    assert_close(parallel.clip_grad_norm(model, norm.item() / 2), norm)
    assert_close(parallel.clip_grad_norm(model, 1e9), norm / 2, tolerance=1e-5)


@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (4, 2)], ids=str)
def test_fsdp_of_all_but_the_experts(ranks, ep):
    shared_pool().run(ranks, with_fsdp, ep)


def with_fsdp_of_experts(rank, group, ep):
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    experts, replicas = grid(ep)
    model = balanced(group.size(), experts)
    world = init_device_mesh("cpu", (group.size(),))
    alike = DeviceMesh.from_group(replicas, "cpu")
    fully_shard(model.moe.router, mesh=world)
    fully_shard(model.moe.shared, mesh=world)
    fully_shard(model.moe, mesh=alike)
    fully_shard(model, mesh=world)
    for step in range(2):
        loss_of(model, example(group.size()).inputs[rank]).backward()
        parallel.average_expert_gradients(model, replicas)
        assert_reference(model, group.size())
        _, norm = reference(group.size())
        assert_close(parallel.clip_grad_norm(model, norm.item() / 2), norm)
        assert_close(parallel.clip_grad_norm(model, 1e9), norm / 2, tolerance=1e-5)
        model.zero_grad()


@pytest.mark.parametrize(("ranks", "ep"), [(4, 2)], ids=str)
def test_fsdp_of_the_experts_over_their_replicas(ranks, ep):
    shared_pool().run(ranks, with_fsdp_of_experts, ep)
