"""Homes of experts by history."""

import numpy as np
import pytest

from ultraep import ConfigError
from ultraep.tools.placement import place_experts


def busiest(loads, order, groups):
    sums = loads[:, order].reshape(len(loads), groups, -1).sum(axis=2)
    return (sums.max(axis=1) / sums.mean(axis=1)).mean()


@pytest.mark.parametrize("seed", range(5))
def test_placed_domains_are_closer_to_the_mean(seed):
    rng = np.random.default_rng(seed)
    heat = rng.uniform(0.1, 3.0, 32)
    loads = rng.poisson(100 * heat, (40, 32))
    order = place_experts(loads[:20], ranks=8, domain=2)
    assert sorted(order.tolist()) == list(range(32))
    blocks = np.arange(32)
    assert busiest(loads[20:], order, 4) < busiest(loads[20:], blocks, 4)
    assert busiest(loads[20:], order, 4) < 1.05


def test_experts_that_are_hot_together_live_apart():
    loads = np.array([[9, 0, 9, 0], [0, 9, 0, 9]])  # equal in sum, not in any microbatch
    first, second = place_experts(loads, ranks=2).reshape(2, 2).tolist()
    assert {0, 2} not in (set(first), set(second))


@pytest.mark.parametrize(("ranks", "domain"), [(3, None), (4, 3)])
def test_uneven_placements_are_refused(ranks, domain):
    with pytest.raises(ConfigError, match=f"8 experts cannot be placed evenly on {ranks} ranks"):
        place_experts(np.ones((1, 8), int), ranks, domain)
