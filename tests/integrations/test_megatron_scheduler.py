"""LoadPlanner meets the planner contract of Megatron-Core's MoE scheduler (development branch)."""

from types import SimpleNamespace

import pytest
import torch
from ranks import on_ranks

from ultraep import BalanceConfig, ConfigError
from ultraep.integrations.megatron.scheduler import LoadPlanner

EXPERTS, HOMES, WIDTH, TOKENS = 8, 4, 5, 40


def context_of(rank, ranks=2, group=None):
    homes = EXPERTS // ranks
    return SimpleNamespace(
        layer_number=1,
        num_logical_experts=EXPERTS,
        num_local_experts=homes,
        local_expert_indices=tuple(range(rank * homes, (rank + 1) * homes)),
        ep_size=ranks,
        ep_rank=rank,
        router_topk=2,
        training=True,
        pg_collection=SimpleNamespace(ep=group),
    )


def skewed_routes(seed):
    """Return probabilities and a routing map in which expert 1 is hot."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(TOKENS, EXPERTS, generator=draw, dtype=torch.float64)
    scores[:, 1] += 3
    chosen = scores.topk(2).indices
    routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, chosen, True)
    probs = scores.masked_fill(~routing_map, -torch.inf).softmax(1)
    return probs.requires_grad_(), routing_map


def experts_of(rank):
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(HOMES, WIDTH, WIDTH, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("slots", [1, 2])
@on_ranks(2)
def test_every_row_is_served_once_and_equals_a_dense_layer(rank, group, slots):
    """A transport of this test copies weights by the replica table and serves physical routes."""
    planner, context = LoadPlanner(slots), context_of(rank, group=group)
    probs, routing_map = skewed_routes(rank)
    assert planner.should_plan(probs, routing_map, context)
    home, replica, state = planner.update_placement(probs, routing_map, context)
    assert home is None
    assert replica.shape == (2, slots)
    assert replica.dtype == torch.int32
    assert (replica >= 0).any()
    routes, gates = planner.reroute(probs, routing_map, state, context)

    physical = 2 * (HOMES + slots)
    assert routes.shape == gates.shape == (TOKENS, physical)
    assert routes.dtype == torch.bool
    assert not gates[~routes].any()
    sources = torch.cat([experts_of(0), experts_of(1)])  # source id: rank * H + local slot
    logical = torch.full((2, HOMES + slots), -1)
    logical[:, :HOMES] = torch.arange(EXPERTS).view(2, HOMES)
    logical[:, HOMES:] = replica
    logical = logical.flatten()
    assert not routes[:, logical < 0].any()  # nothing goes to an empty slot
    served = torch.zeros(TOKENS, EXPERTS, dtype=torch.int64)
    for slot, expert in enumerate(logical.tolist()):
        if expert >= 0:
            served[:, expert] += routes[:, slot]
    assert torch.equal(served, routing_map.long())

    weights = sources[logical.clamp(min=0)]
    draw = torch.Generator().manual_seed(9 + rank)
    x = torch.randn(TOKENS, WIDTH, generator=draw, dtype=torch.float64)
    ours = torch.einsum("ts,td,sde->te", gates, x, weights)
    dense = torch.einsum("ts,td,sde->te", probs, x, sources)
    torch.testing.assert_close(ours, dense, rtol=0, atol=1e-12)
    (d_ours,) = torch.autograd.grad(ours.square().sum(), probs)
    (d_dense,) = torch.autograd.grad(dense.square().sum(), probs)
    torch.testing.assert_close(d_ours[routing_map], d_dense[routing_map], rtol=0, atol=1e-12)

    total = routes.sum(0)
    torch.distributed.all_reduce(total, group=group)
    loads = total.view(2, -1).sum(1)
    before = torch.stack([skewed_routes(r)[1] for r in (0, 1)]).sum((0, 1)).view(2, -1).sum(1)
    assert loads.max() < before.max()


def test_planning_is_skipped_without_slots_or_other_ranks():
    probs, routing_map = skewed_routes(0)
    assert not LoadPlanner(0).should_plan(probs, routing_map, context_of(0))
    assert not LoadPlanner(1).should_plan(probs, routing_map, context_of(0, ranks=1))


def test_wrong_use_is_refused():
    probs, routing_map = skewed_routes(0)
    with pytest.raises(ConfigError, match="objective='time' needs rates"):
        LoadPlanner(1, BalanceConfig(objective="time"))
    context = context_of(0)
    context.local_expert_indices = (0, 2, 4, 6)
    with pytest.raises(ConfigError, match=r"must hold experts \[0, 1, 2, 3\], but holds \[0, 2"):
        LoadPlanner().update_placement(probs, routing_map, context)
    with pytest.raises(ConfigError, match=r"must be \[tokens, 8\], got \[40, 7\]"):
        LoadPlanner().update_placement(probs, routing_map[:, :7], context_of(0))
    with pytest.raises(ConfigError, match="home exchange 3 was completed"):
        LoadPlanner().step(3)
    LoadPlanner().step()
