"""The gap to the exact optimum, which a mixed-integer program finds for small problems."""

import numpy as np
import pytest
from optimum import optimal_peak, small_cases

import ultraep
from ultraep import Topology


def planned_peak(expert_loads, topology):
    loads = np.zeros((topology.ranks, topology.experts), dtype=np.int64)
    loads[0] = expert_loads
    return int(ultraep.plan(loads, topology).rank_loads.max())


def test_the_gap_on_small_random_problems():
    gaps = []
    for case in small_cases(30, seed=1):
        best = optimal_peak(case.expert_loads, case.topology)
        gaps.append(planned_peak(case.expert_loads, case.topology) / max(1, best) - 1)
        assert gaps[-1] >= 0, "no plan beats the optimum"
    assert np.mean(gaps) <= 0.001
    assert max(gaps) <= 0.02


@pytest.mark.parametrize(
    ("expert_loads", "peak"),
    [
        ([9, 0, 0], 3),  # two replicas of the hot expert
        ([6, 6, 0], 4),  # rank 2 gets 4 of one expert, its home 2 of the other
        ([1, 1, 1], 1),
        ([7, 0, 0], 3),  # rounded up
    ],
)
def test_problems_solved_by_hand(expert_loads, peak):
    topology = Topology(ranks=3, experts=3, slots=1)
    assert optimal_peak(np.array(expert_loads), topology) == peak
    assert planned_peak(expert_loads, topology) == peak


def test_many_small_experts_cannot_be_moved_through_one_slot():
    """Rank 0 has many small experts; with one slot, each other rank can take one of them."""
    topology = Topology(ranks=3, experts=12, homes=[0] * 10 + [1, 2], slots=1)
    loads = np.array([10] * 10 + [0, 0])
    assert optimal_peak(loads, topology) == 80
    assert planned_peak(loads, topology) == 80
    two = Topology(ranks=3, experts=12, homes=[0] * 10 + [1, 2], slots=2)
    assert planned_peak(loads, two) == optimal_peak(loads, two) == 60
