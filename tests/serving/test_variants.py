"""EPLB with fixed homes, and forced even choices."""

import numpy as np
import pytest
import torch

import ultraep
from ultraep import BalanceConfig, Topology
from ultraep.errors import ConfigError
from ultraep.tools.serving.variants import AT_HOME, EvenChoices, check_variants


def planned(loads, past, topology):
    made = ultraep.plan(loads, topology, BalanceConfig(policy=AT_HOME), history=past)
    made.check(loads)
    made.check_limits()
    return made


def test_eplb_at_home_copies_what_was_busy_and_splits_it_equally():
    topology = Topology(ranks=2, experts=4, slots=1)
    loads = np.array([[80, 0, 0, 4], [20, 0, 0, 6]])
    made = planned(loads, np.array([100, 2, 3, 4]), topology)
    assert made.replicas[:, :2].tolist() == [[0, 1], [3, 0]]  # all slots, needed or not
    assert made.quotas.tolist() == [50, 5]
    wrong = planned(loads, np.array([2, 100, 3, 4]), topology)  # by another past: it helps nobody
    assert wrong.imbalance >= wrong.initial_imbalance


def test_eplb_at_home_fills_all_slots_and_no_more():
    rng, topology = np.random.default_rng(0), Topology(ranks=4, experts=16, slots=2)
    for _ in range(20):
        past = rng.integers(1, 1000, 16)
        made = planned(rng.integers(8, 200, (4, 16)), past, topology)
        assert 6 <= made.num_replicas <= 8  # the last slots may be left for experts at home there
        assert made.max_ingress == 2


def test_eplb_at_home_stays_in_its_domain_and_needs_a_past():
    topology = Topology(ranks=4, experts=8, slots=1, domain=2)
    loads = np.full((4, 8), 10)
    made = planned(loads, np.array([900, 800, 1, 1, 1, 1, 1, 1]), topology)
    assert not made.leaves_domain
    assert planned(loads, np.zeros(8, dtype=int), topology).num_replicas == 0


def test_even_choices_load_all_ranks_and_experts_alike():
    topology = Topology(ranks=2, experts=8)
    loads = np.zeros((2, 8), dtype=int)
    for rank in range(2):
        hook = EvenChoices(topology, rank)
        hook.on = True
        ids = torch.zeros(64, 2, dtype=torch.int64)
        _, whole = hook(None, (torch.ones(64, 4), ids), {"top_k_weights": None})
        loads[rank] = np.bincount(whole["top_k_index"].flatten(), minlength=8)
        assert (whole["top_k_index"].diff(dim=1) != 0).all()  # a token chooses different experts
    assert loads.sum(axis=0).tolist() == [32] * 8
    assert EvenChoices(topology, 0)(None, (), {}) is None


def test_policies_that_cannot_be_run_are_refused_by_name():
    check_variants(["none", "eplb", "ultraep", "even", "quota"])
    with pytest.raises(ConfigError, match="'lplb' needs more slots"):
        check_variants(["none", "lplb"])
    with pytest.raises(ConfigError, match="unknown policy 'nonsense'"):
        check_variants(["nonsense"])
