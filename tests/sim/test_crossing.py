"""Rows that cross between domains, by formula and counted."""

from __future__ import annotations

from math import comb
from typing import Any

import numpy as np
import pytest
import torch

from ultraep import Topology
from ultraep.runtime.hybrid.crossing import Domains
from ultraep_tools.sim.cluster import load_cluster
from ultraep_tools.sim.crossing import served_shares
from ultraep_tools.sim.run import simulate
from ultraep_tools.sim.runtime import Contender
from ultraep_tools.sim.scenario import Scenario
from ultraep_tools.sim.training import Training
from ultraep_tools.sim.workload import Skew

from .small import gpt_oss

OURS = Contender("ultraep", slots=1)


def counted(ids: Any, topology: Topology) -> Any:
    """[D] share of the tokens that each domain serves, counted by the runtime."""
    domains = Domains(topology, 0, torch.device("cpu"))
    return domains.serving(domains.of_ids(torch.from_numpy(ids))).sum(1).numpy() / len(ids)


def drawn_ids(weights: Any, tokens: int, top_k: int) -> Any:
    """[tokens, top_k] different experts, drawn one after the other."""
    keys = np.random.default_rng(0).exponential(size=(tokens, len(weights))) / weights
    return keys.argsort(axis=1)[:, :top_k].astype(np.int64)


@pytest.mark.parametrize(
    ("experts", "ranks", "domain", "top_k", "rows"),
    [(256, 64, 8, 8, 4.63), (256, 32, 8, 8, 2.71), (128, 16, 8, 8, 1.0), (32, 8, 1, 4, 3.01)],
)
def test_even_routing_crosses_as_the_closed_formula_says(
    experts: int, ranks: int, domain: int, top_k: int, rows: float
) -> None:
    topology = Topology(ranks=ranks, experts=experts, domain=domain)
    domains = topology.num_domains
    elsewhere = comb(experts - experts // domains, top_k) / comb(experts, top_k)
    exact = (domains - 1) * (1 - elsewhere)
    assert exact == pytest.approx(rows, abs=0.005)  # the table of docs/clusters.md
    others = (domains - 1) / domains
    share = counted(drawn_ids(np.ones(experts), 8_000, top_k), topology).sum() * others
    assert share == pytest.approx(exact, rel=0.01)
    even = np.full((1, experts), 1000)
    predicted = served_shares(even, topology, top_k).sum() * others
    assert predicted == pytest.approx(exact, rel=1e-9)


def scenario(**changes: Any) -> Scenario:
    settings: Any = {"cluster": load_cluster("h200-nvl8"), "model": gpt_oss(layers=2), "ranks": 16}
    settings["workload"] = Skew(experts=32, top_k=4, spread=0.8, noise=0.3)
    settings["job"] = Training(tokens=4096, microbatches=2, steps=1)
    return Scenario(**settings | changes)


def test_a_group_of_one_domain_is_faster_than_a_group_of_two() -> None:
    (across,), (inside,) = (simulate(scenario(ranks=ranks), [OURS]) for ranks in (16, 8))
    assert inside.seconds < across.seconds
