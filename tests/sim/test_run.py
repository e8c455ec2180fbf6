"""simulate: whole scenarios of a moment each, and published figures next to the simulator's."""

import dataclasses
from dataclasses import replace
from functools import cache
from math import comb
from typing import Any

import numpy as np
import pytest
import torch
from published import CONTENDERS, scenario_of, settings, share_of_ideal

from ultraep import policies
from ultraep.errors import ConfigError
from ultraep.policies import get_policy
from ultraep.runtime.hybrid.crossing import Domains
from ultraep.topology import Topology
from ultraep_tools.sim.cluster import load_cluster
from ultraep_tools.sim.crossing import served_shares
from ultraep_tools.sim.model import load_model
from ultraep_tools.sim.run import Result, simulate
from ultraep_tools.sim.runtime import Contender
from ultraep_tools.sim.scenario import Scenario
from ultraep_tools.sim.serving import Serving
from ultraep_tools.sim.training import Training, pipeline_seconds
from ultraep_tools.sim.workload import Recorded, fit_skew

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


def test_a_policy_without_costs_of_its_own_has_those_of_its_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, like in (("exact", "quota"), ("past", "eplb")):
        monkeypatch.setitem(policies._registry, name, replace(get_policy(like), name=name))
    exact, past = simulate(glm_scenario(), ["exact", "past"])
    assert (exact.priced_as, past.priced_as) == ("ultraep", "eplb")
    assert exact.stages["plan"] == results()[4].stages["plan"] > 0


def test_a_policy_that_ignores_slots_cannot_be_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    ideal = get_policy("ideal")
    monkeypatch.setitem(policies._registry, "free", replace(ideal, name="free"))
    with pytest.raises(ConfigError, match="free cannot be simulated: it replicates beyond spare"):
        Contender("free")


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


# Rows that cross between domains


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


# The rate of a prefill job, and the time of a pipeline


def test_a_prefill_rate_is_the_tokens_over_the_time_of_all_layers() -> None:
    model = replace(load_model("glm-4.5-106b"), layers=3)
    loads = Recorded(np.arange(128).reshape(1, 1, 128) + 1, model.top_k)
    job = Serving(tokens=8192, sequence=2048, iterations=2)
    scenario = Scenario(
        cluster=load_cluster("h200-nvl8"), model=model, workload=loads, job=job, ranks=8
    )
    costs = scenario.costs
    dense = costs.attention(8192, 1024) + costs.dense_mlp(8192)
    none, ours, ideal = simulate(scenario, ["none", "ultraep", "ideal"])
    for result in (none, ours, ideal):
        assert not any("back" in stage for stage in result.stages)
        assert result.throughput == result.tokens_per_second
        assert result.throughput == pytest.approx(8192 / (dense + result.seconds))
    assert none.throughput < ours.throughput < ideal.throughput


def longest_path(forward: Any, backward: Any) -> float:
    """The end of the last pass: each waits for its input and for the pass before it."""
    count, stages = forward.shape

    def passes(stage: int) -> list[tuple[str, int]]:
        """At most `stages - stage` microbatches are in flight on a stage."""
        warm = min(count, stages - stage)
        rest = [[("b", n), ("f", n + warm)] for n in range(count)]
        in_order = [("f", n) for n in range(warm)] + [step for pair in rest for step in pair]
        return [step for step in in_order if step[1] < count]

    @cache
    def end(kind: str, number: int, stage: int) -> float:
        order = passes(stage)
        index = order.index((kind, number))
        before = end(*order[index - 1], stage) if index else 0.0
        if kind == "f":
            ready = end("f", number, stage - 1) if stage else 0.0
        else:
            last = stage == stages - 1
            ready = end("f", number, stage) if last else end("b", number, stage + 1)
        return max(before, ready) + (forward if kind == "f" else backward)[number, stage]

    return max(end("b", count - 1, stage) for stage in range(stages))


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_a_pipeline_takes_as_long_as_its_longest_path(count: int, stages: int) -> None:
    rng = np.random.default_rng([count, stages])
    for _ in range(10):
        forward, backward = rng.exponential(1.0, (2, count, stages)) + 1e-3
        assert pipeline_seconds(forward, backward) == pytest.approx(longest_path(forward, backward))
    equal = pipeline_seconds(np.full((count, stages), 0.3), np.full((count, stages), 0.7))
    assert equal == pytest.approx(count + stages - 1)  # the known bubble
