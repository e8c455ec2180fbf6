"""simulate: whole scenarios of a moment each, and published figures next to the simulator's."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
from published import CONTENDERS, scenario_of, settings, share_of_ideal

from ultraep import policies
from ultraep.errors import ConfigError
from ultraep.policies import Problem, register_policy
from ultraep.topology import Topology
from ultraep_tools.sim.cluster import load_cluster
from ultraep_tools.sim.model import load_model
from ultraep_tools.sim.run import Result, simulate
from ultraep_tools.sim.scenario import Scenario
from ultraep_tools.sim.training import Training
from ultraep_tools.sim.workload import fit_skew

POLICIES = ["none", "eplb", "lplb", "quota", "ultraep", "ideal"]
GLM = dataclasses.replace(load_model("glm-4.5-106b"), layers=5)
LAYERS = range(1, 5)
TRAINING = Training(tokens=4096, sequence=4096, microbatches=3, steps=1, groups=2)
WORKLOAD = fit_skew(2.2, Topology(ranks=16, experts=128), 8, LAYERS, noise=0.25)


def glm_scenario(**changes: Any) -> Scenario:
    """Four layers with experts on 16 ranks."""
    chosen: Any = {"cluster": load_cluster("gb200-nvl72"), "model": GLM, "job": TRAINING}
    chosen |= {"workload": WORKLOAD, "ranks": 16, "slots": 2, "interval": 10}
    return Scenario(**chosen | changes)


@cache
def results() -> list[Result]:
    return simulate(glm_scenario(), POLICIES)


def test_a_policy_without_costs_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "_registry", dict(policies._registry))
    calls = []

    @register_policy("mine")
    def mine(problem: Problem) -> Any:
        calls.append(problem)
        return np.empty((0, 3), dtype=np.int64)

    with pytest.raises(ConfigError, match=r"'mine' has no costs of its own.*mine=NAME"):
        simulate(glm_scenario(), ["none", "mine"])
    assert not calls
    (priced,) = simulate(glm_scenario(), ["mine=quota"])
    none = results()[0]
    assert (priced.policy, priced.priced_as, priced.label) == ("mine", "quota", "mine=quota")
    assert len(calls) == 6 * 4
    assert priced.imbalance == none.imbalance
    assert priced.stages["plan"] > none.stages["plan"] == 0


def test_results_are_reproducible_and_progress_is_reported() -> None:
    reports: list[tuple[int, int]] = []
    again = simulate(glm_scenario(), POLICIES, report=lambda *layers: reports.append(layers))
    assert reports == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert again == results()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 48}, "128 experts of glm-4.5-106b .* 48 ranks; choose --ep that divides 128"),
        ({"job": Training(groups=1000)}, "needs 16000 devices, .* gb200-nvl72 has 9216"),
        ({"workload": dataclasses.replace(WORKLOAD, experts=64)}, "has 64 experts, .* 128"),
        ({"interval": 0}, "interval must be at least 1, got 0"),
        ({"job": Training(pipeline=6)}, "5 layers cannot be split into 6 pipeline stages"),
        (
            {"model": load_model("qwen3-235b"), "job": Training()},
            r"\d{3} GB of weights and .* into the 186 GB .* use more ranks, a pipeline or groups",
        ),
    ],
)
def test_invalid_scenarios(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        glm_scenario(**changes)


SETTINGS = {setting.name: setting for setting in settings()}
SIMULATED = ["glm-train", pytest.param("qwen-train", marks=pytest.mark.slow)]


@cache
def published_results(name: str) -> list[Result]:
    return simulate(scenario_of(SETTINGS[name], steps=1), CONTENDERS)


@pytest.mark.parametrize("name", SIMULATED)
def test_shares_imbalance_and_order_are_near_the_published_results(name: str) -> None:
    setting, shares = SETTINGS[name], share_of_ideal(published_results(name))
    for policy in ("none", "eplb", "lplb", "quota"):
        assert shares[policy] == pytest.approx(setting.share(policy), abs=0.05), policy
    for result in published_results(name):
        if result.policy in setting.imbalance:
            assert result.imbalance == pytest.approx(setting.imbalance[result.policy], rel=0.08)
    published = setting.throughput
    assert sorted(published, key=published.__getitem__) == sorted(published, key=shares.__getitem__)
    assert shares["quota"] < shares["ultraep"] < shares["ideal"]
