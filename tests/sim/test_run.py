"""simulate: everything together, on scenarios that take a moment."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from ultraep import policies
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.policies import Problem, register_policy
from ultraep.tools.sim.cluster import load_cluster
from ultraep.tools.sim.memory import memory_of
from ultraep.tools.sim.model import load_model
from ultraep.tools.sim.planning import plan_layer
from ultraep.tools.sim.run import Result, simulate, time_layer
from ultraep.tools.sim.runtime import runtime_of
from ultraep.tools.sim.scenario import Contender, Scenario
from ultraep.tools.sim.serving import Requests, Serving, make_iteration, rate_at_limit
from ultraep.tools.sim.training import Training
from ultraep.tools.sim.workload import Skew, fit_skew
from ultraep.topology import Topology

POLICIES = ["none", "eplb", "lplb", "quota", "ultraep", "ideal"]
GLM = dataclasses.replace(load_model("glm-4.5-106b"), layers=5)
TRAINING = Training(tokens=4096, sequence=4096, microbatches=3, steps=1, groups=2)
PREFILL = Serving(
    requests=Requests(name="x", title="", mean_tokens=2000.0, spread=0.5, limit_s=0.2),
    chunk=4096,
    iterations=5,
)


def scenario(**changes: Any) -> Scenario:
    """Four layers of experts on 16 ranks, as skewed as published."""
    chosen: dict[str, Any] = {
        "cluster": load_cluster("gb200-nvl72"),
        "model": GLM,
        "job": TRAINING,
        "ranks": 16,
        "slots": 2,
        "interval": 10,
    }
    made = {**chosen, **changes}
    if "workload" not in made:
        model = made["model"]
        topology = Topology(ranks=16, experts=model.experts)
        made["workload"] = fit_skew(2.2, topology, model.top_k, range(1, 5), noise=0.25)
    return Scenario(**made)


def check_equal(one: Result, other: Result) -> None:
    """Bit by bit."""
    for field in dataclasses.fields(Result):
        mine, others = getattr(one, field.name), getattr(other, field.name)
        assert np.array_equal(mine, others), field.name


# What comes out


@pytest.mark.parametrize("job", [TRAINING, PREFILL])
def test_skewed_loads_rank_the_policies(job: Any) -> None:
    results = simulate(scenario(job=job), POLICIES)
    assert [result.label for result in results] == POLICIES
    none, eplb, lplb, quota, ultraep, ideal = results
    assert max(results, key=lambda result: result.throughput) is ideal
    assert none.throughput < quota.throughput <= ultraep.throughput < ideal.throughput
    assert none.imbalance > eplb.imbalance > 1.02
    assert none.imbalance > lplb.imbalance > 1.02
    assert ultraep.imbalance < 1.011
    assert ideal.imbalance == pytest.approx(1, abs=1e-3)
    assert (none.copies, ideal.copies) == (0, 0)
    assert ultraep.copies > 0


def test_throughput_is_in_the_unit_it_says() -> None:
    train, prefill = (simulate(scenario(job=job), ["none"])[0] for job in (TRAINING, PREFILL))
    assert train.unit == "TFLOP/s per device"
    operations = GLM.training_operations(4096)
    assert train.throughput == pytest.approx(train.tokens_per_second * operations / 1e12)
    assert 10 < train.throughput < 2500
    assert prefill.unit == "requests/s"
    assert prefill.throughput == pytest.approx(prefill.tokens_per_second * 16 / 2000)


@pytest.mark.parametrize("policy", ["none", "ultraep"])
def test_requests_wait_for_iterations_of_all_layers(policy: str) -> None:
    made = scenario(job=PREFILL)
    (result,) = simulate(made, [policy])
    layers = [time_layer(made, [Contender.of(policy)], layer)[0].forward for layer in range(1, 5)]
    fixed_S, rows_S = (
        sum(stages[name] for stages in layers for name in names)
        for names in (("loads", "plan", "replicate", "reroute"), ("dispatch", "experts", "combine"))
    )
    iteration = make_iteration(made.costs, PREFILL, rows_S, fixed_S.mean())
    wanted = rate_at_limit(iteration, PREFILL, 16)
    assert result.throughput == pytest.approx(wanted, rel=0.01)


def test_stages_add_up_to_a_microbatch() -> None:
    for result in simulate(scenario(), POLICIES):
        assert sum(result.stages.values()) == pytest.approx(result.seconds)
        assert result.by_microbatch.mean() == pytest.approx(result.seconds)
        assert result.by_microbatch.shape == (6,)
        assert result.imbalance_by_layer.shape == (4,)
        assert result.imbalance_by_layer.mean() == pytest.approx(result.imbalance)
        assert result.worst_imbalance >= result.imbalance_by_layer.max()


def test_the_first_interval_is_past_and_seen_by_placements_only() -> None:
    made = scenario(interval=4)
    loads_SE = made.workload.expert_loads(2, np.arange(10), made.rows)
    past_E, now_SE = loads_SE[:4].sum(axis=0), loads_SE[4:]
    policies = ["none", "eplb", "lplb", "ultraep"]
    layer = time_layer(made, [Contender.of(policy) for policy in policies], 2)
    for policy, times in zip(policies, layer, strict=True):
        tolerance = 0.01 if policy == "ultraep" else 0.0
        config = BalanceConfig(policy=policy, tolerance=tolerance)
        copies = plan_layer(now_SE, made.topology, config, interval=4, past_E=past_E)
        rank_SR = copies.rank_loads(made.topology)
        assert times.rank_rows.tolist() == rank_SR.max(axis=1).tolist()
        assert times.copies.sum() == len(copies.rows)


def test_a_policy_without_costs_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies, "_registry", dict(policies._registry))
    asked = []

    @register_policy("mine")
    def mine(problem: Problem) -> Any:
        asked.append(problem)
        return np.empty((0, 3), dtype=np.int64)

    for contender in ("mine", Contender("mine", "a label")):
        with pytest.raises(ConfigError, match=r"'mine' has no costs of its own.*mine=NAME"):
            simulate(scenario(), [contender])
    assert not asked
    none, priced = simulate(scenario(), ["none", "mine=quota"])
    assert (priced.policy, priced.priced_as, priced.label) == ("mine", "quota", "mine=quota")
    assert len(asked) == 6 * 4
    assert priced.imbalance == none.imbalance
    assert priced.stages["plan"] > none.stages["plan"] == 0


def test_settings_of_a_contender_go_before_those_of_the_scenario() -> None:
    made = scenario()
    free = dataclasses.replace(runtime_of("ultraep"), layer_us=5000.0)
    usual, one, loose, slow = simulate(
        made,
        [
            "ultraep",
            Contender("ultraep", "one slot", slots=1),
            Contender("ultraep", "loose", tolerance=0.3),
            Contender("ultraep", "slow", runtime=free),
        ],
    )
    assert (usual.slots, one.slots) == (2, 1)
    assert one.memory.slots < usual.memory.slots
    assert loose.copies < usual.copies
    assert loose.imbalance == pytest.approx(1.3, abs=0.06)
    assert slow.stages["plan"] == pytest.approx(usual.stages["plan"] + 4 * 0.005)
    assert [r.label for r in (usual, one, loose, slow)] == ["ultraep", "one slot", "loose", "slow"]


def fullest_by_microbatch(made: Scenario) -> Any:
    """[S] rows of the fullest rank of any layer when nothing is balanced."""
    layers = [time_layer(made, [Contender.of("none")], layer)[0] for layer in range(1, 5)]
    return np.max([times.rank_rows for times in layers], axis=0)


def test_memory_is_that_of_the_fullest_rank() -> None:
    made = scenario()
    none, ideal = simulate(made, ["none", "ideal"])
    fullest = float(fullest_by_microbatch(made).max())
    assert none.memory == memory_of(GLM, 16, 0, TRAINING, fullest)
    assert none.memory.rows > 2 * ideal.memory.rows
    assert none.out_of_memory == 0


def test_devices_that_are_too_small_for_the_fullest_rank_of_some_microbatches() -> None:
    fullest_S = fullest_by_microbatch(scenario())
    enough = memory_of(GLM, 16, 0, TRAINING, float(np.sort(fullest_S)[3])).total
    small = dataclasses.replace(load_cluster("gb200-nvl72"), memory_gb=enough / 1e9)
    none, ideal = simulate(scenario(cluster=small), ["none", "ideal"])
    assert none.out_of_memory == pytest.approx(2 / 6)
    assert ideal.out_of_memory == 0


# The same however it is worked out


def test_results_do_not_depend_on_the_processes() -> None:
    made = scenario()
    for one, two in zip(
        simulate(made, POLICIES), simulate(made, POLICIES, processes=2), strict=True
    ):
        check_equal(one, two)


def test_progress_is_reported_layer_by_layer() -> None:
    seen: list[tuple[int, int]] = []
    simulate(scenario(), ["none"], report=lambda done, all_: seen.append((done, all_)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


# Errors


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": 48}, "128 experts of glm-4.5-106b do not divide evenly over 48 ranks"),
        ({"ranks": 256}, "128 experts of glm-4.5-106b do not divide evenly over 256 ranks"),
        ({"ranks": 0}, "ranks must be at least 1, got 0"),
        (
            {"job": Training(groups=1000)},
            "16000 devices are needed, cluster gb200-nvl72 has 9216",
        ),
        (
            {"workload": Skew(experts=64, top_k=8, spread=1.0, noise=0.4)},
            "the workload has 64 experts, model glm-4.5-106b has 128",
        ),
        ({"interval": 0}, "interval must be at least 1, got 0"),
        ({"slots": 129}, "slots must lie between 0 and 128, got 129"),
        ({"domain": 5}, "16 ranks do not divide by a domain of 5"),
        ({"job": Training(pipeline=6)}, "5 layers cannot be dealt out to 6 pipeline parts"),
    ],
)
def test_scenarios_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        scenario(**changes)


def test_weights_that_do_not_fit_are_told_with_both_sizes() -> None:
    model = load_model("deepseek-v3-671b")
    with pytest.raises(ConfigError, match=r"\d{3} GB of weights and .* into the 186 GB of cluster"):
        scenario(model=model, job=Training())
    with pytest.raises(
        ConfigError, match=r"\d{2,3} GB of weights per .* the 80 GB of cluster h100"
    ):
        scenario(model=load_model("kimi-k2"), job=PREFILL, cluster=load_cluster("h100-nvl8"))


def test_there_must_be_something_to_simulate() -> None:
    with pytest.raises(ConfigError, match="name at least one policy"):
        simulate(scenario(), [])
    with pytest.raises(ConfigError, match="processes must be at least 1, got 0"):
        simulate(scenario(), ["none"], processes=0)
    with pytest.raises(ConfigError, match="nosuch"):
        simulate(scenario(), ["nosuch"])
