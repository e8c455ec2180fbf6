"""Topologies, and invalid topologies and settings."""

import dataclasses

import numpy as np
import pytest

from ultraep import BalanceConfig, ConfigError, Topology


def test_homes_are_contiguous_blocks():
    topology = Topology(ranks=3, experts=6)
    assert topology.home_of_expert.tolist() == [0, 0, 1, 1, 2, 2]
    assert topology.homes_per_rank.tolist() == [2, 2, 2]
    assert (topology.slots, topology.domain, topology.num_domains) == (1, 3, 1)


def test_homes_as_an_argument():
    topology = Topology(ranks=3, experts=4, homes=np.array([2, 0, 2, 2]))
    assert topology.experts_by_rank.tolist() == [1, 0, 2, 3]
    assert topology.first_of_rank.tolist() == [0, 1, 1, 4]
    assert topology.homes == (2, 0, 2, 2)


def test_topologies_are_values():
    first, second = (Topology(ranks=2, experts=4, homes=[0, 1, 1, 1]) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != Topology(ranks=2, experts=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.ranks = 3
    with pytest.raises(ValueError, match="read-only"):
        first.home_of_expert[0] = 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 0}, "ranks must lie between 1 and .*, got 0"),
        ({"ranks": 2.0}, "ranks must be an integer, got 2.0"),
        ({"ranks": True}, "ranks must be an integer, got True"),
        ({"experts": 0}, "experts must lie between"),
        ({"experts": 7}, "7 experts do not divide evenly over 4 ranks"),
        ({"slots": -1}, "slots must lie between 0 and 8, got -1"),
        ({"slots": 9}, "slots must lie between 0 and 8, got 9"),
        ({"domain": 0}, "domain must lie between 1 and 4, got 0"),
        ({"domain": 5}, "domain must lie between 1 and 4, got 5"),
        ({"domain": 3}, "4 ranks do not divide by a domain of 3"),
        ({"homes": [0, 1]}, "each of the 8 experts, got shape"),
        ({"homes": [0.5] * 8}, "homes must be integers"),
        ({"homes": [4] * 8}, r"homes must lie in 0\.\.3, got 4\.\.4"),
        ({"homes": [-1] * 8}, r"homes must lie in 0\.\.3, got -1\.\.-1"),
    ],
)
def test_bad_topologies_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Topology(**{"ranks": 4, "experts": 8} | settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": ""}, "policy must be a name"),
        ({"policy": None}, "policy must be a name"),
        ({"tolerance": -0.1}, "tolerance must lie between 0 and 1000, got -0.1"),
        ({"tolerance": float("nan")}, "got nan"),
        ({"tolerance": float("inf")}, "got inf"),
        ({"tolerance": "1%"}, "tolerance must be a number"),
        ({"min_tokens_per_replica": 0}, "at least 1, got 0"),
        ({"min_tokens_per_replica": 1.5}, "at least 1, got 1.5"),
        ({"max_replicas": -1}, "at least 0, got -1"),
        ({"locality": 1}, "True or False, got 1"),
        ({"objective": "speed"}, "must be one of time, balance, got 'speed'"),
        ({"rates": (1, 2, 3, 4)}, "rates must be Rates or None"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        BalanceConfig(**settings)


def test_settings_are_frozen_keyword_only_and_known():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BalanceConfig().tolerance = 0.5
    with pytest.raises(TypeError):
        BalanceConfig("none")
    with pytest.raises(TypeError):
        BalanceConfig(tolerence=0.1)
