"""Rates of a cluster and a model: they follow the sizes, and plans can be made by them."""

import pytest

import ultraep
from ultraep import BalanceConfig, ConfigError, Topology, workload
from ultraep.tools.sim.costs import rates_of

CLUSTER, MODEL = "h200-nvl8", "qwen3-235b"


def test_rates_follow_sizes():
    many = rates_of(CLUSTER, MODEL, ranks=8, tokens=8192)
    few = rates_of(CLUSTER, MODEL, ranks=8, tokens=4)
    learning = rates_of(CLUSTER, MODEL, ranks=8, tokens=8192, training=True)
    larger = rates_of(CLUSTER, "deepseek-v3-671b", ranks=8, tokens=8192)
    assert few.row < many.row < learning.row
    assert few.copy == many.copy < learning.copy
    assert many.copy < larger.copy


def test_only_what_pays_is_copied():
    """A rank with 1.5 times the mean: with many tokens copies pay, with few they do not."""
    topology = Topology(ranks=8, experts=128)
    copies = []
    for tokens in (16, 8192):
        rates = rates_of(CLUSTER, MODEL, ranks=8, tokens=tokens)
        loads = workload.zipf(8, 128, ratio=1.5, top_k=8, tokens=tokens)
        copies.append(ultraep.plan(loads, topology, BalanceConfig(rates=rates)).num_replicas)
    assert copies[0] == 0 < copies[1]


@pytest.mark.parametrize("sizes", [{"ranks": 0, "tokens": 1}, {"ranks": 1, "tokens": 0}])
def test_nothing_to_do(sizes):
    with pytest.raises(ConfigError, match="ranks and tokens must be at least 1, got"):
        rates_of(CLUSTER, MODEL, **sizes)
