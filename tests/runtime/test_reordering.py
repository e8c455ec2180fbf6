"""Experts in another order."""

import pytest
import torch

from ultraep import BalancedMoE, Balancer, ConfigError, LocalGroup, reorder_experts
from ultraep.topology import even_homes


def test_reordered_experts_compute_the_same():
    x = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def work(comm):
        balancer = Balancer(comm, experts=even_homes(5, comm.size), slots=1)
        moe, other = (
            BalancedMoE.swiglu(8, 4, 5, 2, balancer=balancer, seed=seed, dtype=torch.float64)
            for seed in (3, 4)
        )
        other.load_full_state_dict(reorder_experts(moe.full_state_dict(), [3, 0, 4, 1, 2]))
        return moe(x), other(x)

    for before, after in LocalGroup(2).run(work):
        torch.testing.assert_close(before, after)


@pytest.mark.parametrize(
    ("order", "message"),
    [([0, 0, 1, 2, 3], "every expert once"), ([1, 0], "has 5 experts, but the order has 2")],
)
def test_a_wrong_order_is_refused(order, message):
    with pytest.raises(ConfigError, match=message):
        reorder_experts({"experts.down_proj": torch.zeros(5, 2)}, order)
