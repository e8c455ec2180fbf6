"""simulate: whole scenarios of a moment each."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest

from ultraep import policies
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.policies import Problem, register_policy
from ultraep.tools.sim.cluster import load_cluster
from ultraep.tools.sim.model import load_model
from ultraep.tools.sim.planning import plan_layer
from ultraep.tools.sim.run import Result, simulate, time_layer
from ultraep.tools.sim.runtime import Contender, runtime_of
from ultraep.tools.sim.scenario import Scenario
from ultraep.tools.sim.serving import Requests, Serving
from ultraep.tools.sim.training import Training
from ultraep.tools.sim.workload import fit_skew
from ultraep.topology import Topology

POLICIES = ["none", "eplb", "lplb", "quota", "ultraep", "ideal"]
GLM = dataclasses.replace(load_model("glm-4.5-106b"), layers=5)
LAYERS = range(1, 5)
TRAINING = Training(tokens=4096, sequence=4096, microbatches=3, steps=1, groups=2)
PREFILL = Serving(
    requests=Requests(name="x", title="", mean_tokens=2000.0, spread=0.5, limit_s=0.2),
    tokens=4096,
    iterations=5,
)
WORKLOAD = fit_skew(2.2, Topology(ranks=16, experts=128), 8, LAYERS, noise=0.25)


def glm_scenario(**changes: Any) -> Scenario:
    """Four layers with experts on 16 ranks."""
    chosen: Any = {"cluster": load_cluster("gb200-nvl72"), "model": GLM, "job": TRAINING}
    chosen |= {"workload": WORKLOAD, "ranks": 16, "slots": 2, "interval": 10}
    return Scenario(**chosen | changes)


@cache
def results(job: Training | Serving) -> list[Result]:
    return simulate(glm_scenario(job=job), POLICIES)


# Results


@pytest.mark.parametrize("job", [TRAINING, PREFILL])
def test_order_and_imbalance_of_the_policies(job: Any) -> None:
    assert [result.label for result in results(job)] == POLICIES
    none, eplb, lplb, quota, ultraep, ideal = results(job)
    assert max(results(job), key=lambda result: result.throughput) is ideal
    assert none.throughput < quota.throughput <= ultraep.throughput < ideal.throughput
    assert none.imbalance > eplb.imbalance > 1.02
    assert none.imbalance > lplb.imbalance > 1.02
    assert ultraep.imbalance < 1.011
    assert ideal.imbalance == pytest.approx(1, abs=1e-3)
    assert (none.copies, ideal.copies) == (0, 0)
    assert ultraep.copies > 0


def test_only_placements_use_the_first_interval() -> None:
    scenario = glm_scenario(interval=4)
    loads_SE = scenario.workload.expert_loads(2, np.arange(10), scenario.rows)
    past_E, now_SE = loads_SE[:4].sum(axis=0), loads_SE[4:]
    names = ["none", "eplb", "lplb", "ultraep"]
    layer = time_layer(scenario, [Contender.of(name) for name in names], 2)
    for name, times in zip(names, layer, strict=True):
        config = BalanceConfig(policy=name, tolerance=0.01 if name == "ultraep" else 0.0)
        replicas = plan_layer(now_SE, scenario.topology, config, interval=4, past_E=past_E)
        assert times.rank_rows.tolist() == replicas.rank_loads.max(axis=1).tolist()
        assert times.replicas.sum() == len(replicas.rows)


def test_a_policy_without_costs_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    none = results(TRAINING)[0]
    assert (priced.policy, priced.priced_as, priced.label) == ("mine", "quota", "mine=quota")
    assert len(calls) == 6 * 4
    assert priced.imbalance == none.imbalance
    assert priced.stages["plan"] > none.stages["plan"] == 0


def test_settings_of_a_contender_override_the_scenario() -> None:
    slower = dataclasses.replace(runtime_of("ultraep"), layer_us=5000.0)
    one_slot, loose, slow = simulate(
        glm_scenario(),
        [
            Contender("ultraep", "one slot", slots=1),
            Contender("ultraep", "loose", tolerance=0.3),
            Contender("ultraep", "slow", runtime=slower),
        ],
    )
    usual = results(TRAINING)[POLICIES.index("ultraep")]
    assert (usual.slots, one_slot.slots) == (2, 1)
    assert one_slot.memory.slots < usual.memory.slots
    assert loose.copies < usual.copies
    assert loose.imbalance == pytest.approx(1.3, abs=0.06)
    assert slow.stages["plan"] == pytest.approx(usual.stages["plan"] + 4 * 0.005)
    assert [result.label for result in (one_slot, loose, slow)] == ["one slot", "loose", "slow"]


def test_memory_of_the_busiest_rank() -> None:
    scenario, none, ideal = glm_scenario(), results(TRAINING)[0], results(TRAINING)[-1]
    layers = [time_layer(scenario, [Contender.of("none")], layer)[0] for layer in LAYERS]
    busiest_S = np.max([times.rank_rows for times in layers], axis=0)
    assert none.memory == scenario.memory(0, float(busiest_S.max()))
    assert none.memory.rows > 2 * ideal.memory.rows
    assert none.out_of_memory == 0
    # Enough memory for four of the six microbatches:
    enough = scenario.memory(0, float(np.sort(busiest_S)[3])).total
    small = dataclasses.replace(scenario.cluster, memory_gb=enough / 1e9)
    none, ideal = simulate(glm_scenario(cluster=small), ["none", "ideal"])
    assert (none.out_of_memory, ideal.out_of_memory) == (pytest.approx(2 / 6), 0)


def test_results_do_not_depend_on_processes_and_progress_is_reported() -> None:
    reports: list[tuple[int, int]] = []
    parallel = simulate(
        glm_scenario(), POLICIES, processes=2, report=lambda *layers: reports.append(layers)
    )
    assert reports == [(1, 4), (2, 4), (3, 4), (4, 4)]
    for sequential, concurrent in zip(results(TRAINING), parallel, strict=True):
        for field in dataclasses.fields(Result):
            name = field.name
            assert np.array_equal(getattr(sequential, name), getattr(concurrent, name)), name


# Errors


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


def test_invalid_simulations() -> None:
    with pytest.raises(ConfigError, match="name at least one policy"):
        simulate(glm_scenario(), [])
    with pytest.raises(ConfigError, match="processes must be at least 1, got 0"):
        simulate(glm_scenario(), ["none"], processes=0)
