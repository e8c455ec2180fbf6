"""EPLB with fixed homes, and forced even choices."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import ultraep
from ultraep import BalanceConfig, Topology
from ultraep.errors import ConfigError
from ultraep.tools.serving.engine import AT_HOME, EvenTurns, ForcedChoices, check_variants


def plan_at_home(loads, past, topology):
    plan = ultraep.plan(loads, topology, BalanceConfig(policy=AT_HOME), history=past)
    plan.check(loads)
    plan.check_limits()
    return plan


def test_eplb_replicates_experts_of_the_past_and_splits_loads_equally():
    topology = Topology(ranks=2, experts=4, slots=1)
    loads = np.array([[80, 0, 0, 4], [20, 0, 0, 6]])
    plan = plan_at_home(loads, np.array([100, 2, 3, 4]), topology)
    assert plan.replicas[:, :2].tolist() == [[0, 1], [3, 0]]  # fills all slots
    assert plan.quotas.tolist() == [50, 5]
    outdated = plan_at_home(loads, np.array([2, 100, 3, 4]), topology)
    assert outdated.imbalance >= outdated.initial_imbalance


def test_eplb_fills_all_slots_and_needs_a_past():
    rng, topology = np.random.default_rng(0), Topology(ranks=4, experts=16, slots=2)
    for _ in range(20):
        plan = plan_at_home(rng.integers(8, 200, (4, 16)), rng.integers(1, 1000, 16), topology)
        assert 6 <= plan.num_replicas <= 8  # a slot stays empty if only home experts are left
        assert plan.max_ingress == 2
        near = plan_at_home(plan.loads, rng.integers(1, 1000, 16), replace(topology, domain=2))
        assert not near.leaves_domain
    assert plan_at_home(plan.loads, np.zeros(16, dtype=int), topology).num_replicas == 0


def test_even_choices_load_all_ranks_and_experts_equally():
    topology = Topology(ranks=2, experts=8)
    loads = np.zeros((2, 8), dtype=int)
    for rank in range(2):
        hook = ForcedChoices(EvenTurns(topology, rank).chosen)
        assert hook(None, (), {}) is None
        hook.on = True
        ids = torch.zeros(64, 2, dtype=torch.int64)
        _, named = hook(None, (torch.ones(64, 4), ids), {"top_k_weights": None})
        loads[rank] = np.bincount(named["top_k_index"].flatten(), minlength=8)
        assert (named["top_k_index"].diff(dim=1) != 0).all()  # different experts per token
    assert loads.sum(axis=0).tolist() == [32] * 8


def test_policies_that_cannot_run_are_refused():
    check_variants(["none", "eplb", "ultraep", "even", "quota"])
    with pytest.raises(ConfigError, match="'lplb' moves homes or needs more slots"):
        check_variants(["none", "lplb"])
    with pytest.raises(ConfigError, match="unknown policy 'missing'"):
        check_variants(["missing"])
