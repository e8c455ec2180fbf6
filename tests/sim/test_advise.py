"""advise: the best configuration, the number of slots, and reasons."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from ultraep.topology import Topology
from ultraep.workload import Load
from ultraep_tools.sim.advise import Advice, Configuration, advise
from ultraep_tools.sim.cluster import load_cluster
from ultraep_tools.sim.scenario import Scenario
from ultraep_tools.sim.training import Training
from ultraep_tools.sim.workload import Recorded, fit_skew

from .small import gpt_oss

RANKS = 8
MODEL = gpt_oss(layers=6)
GB = 1e9
EVEN = {"imbalance": 1.02, "noise": 0.01}


@cache
def scenario(
    imbalance: float = 1.6,
    noise: float = 0.25,
    tokens: int = 8192,
    memory_gb: float = 141,
    **changes: Any,
) -> Scenario:
    topology = Topology(ranks=RANKS, experts=MODEL.experts)
    settings: Any = {"ranks": RANKS, "model": MODEL}
    settings["cluster"] = replace(load_cluster("h200-nvl8"), memory_gb=memory_gb)
    settings["workload"] = fit_skew(imbalance, topology, MODEL.top_k, range(6), noise=noise)
    settings["job"] = Training(tokens=tokens, microbatches=4, steps=1)
    return Scenario(**settings | changes)


@cache
def advised(**changes: Any) -> Advice:
    return advise(scenario(**changes))


def reasons(advice: Advice) -> str:
    return " ".join(advice.reasons)


def test_a_hot_rank_whose_rows_are_spread_evenly_needs_a_second_slot() -> None:
    loads = Load("hot rank", 2.87).draw(RANKS, 128, tokens=4096).sum(axis=0)
    model = replace(MODEL, experts=128, top_k=8)
    workload = Recorded(loads[None, None], top_k=8)
    advice = advise(replace(scenario(), model=model, workload=workload))
    assert advice.best.advised.slots == 2
    assert "more slots help: imbalance 1.60 with 1 slot, 1.01 with 2" in reasons(advice)


def test_a_group_of_one_domain_that_does_not_fit_is_an_obstacle() -> None:
    job = replace(scenario().job, tokens=64)
    whole = job.weight_bytes(MODEL, RANKS)
    halves = replace(job, groups=2).weight_bytes(MODEL, RANKS // 2)
    memory_gb = (whole + halves) / 2 / GB
    small = replace(load_cluster("h200-nvl8"), domain=4, memory_gb=memory_gb)
    advice = advise(replace(scenario(), cluster=small, job=job))
    assert advice.inside is None
    assert "GB of weights and optimizer state per device do not fit" in reasons(advice)


@dataclass(frozen=True)
class Tried:
    """The numbers of a result that decide."""

    slots: int
    throughput: float
    out_of_memory: float = 0.0
    policy: str = "ultraep"


@pytest.mark.parametrize(
    ("tried", "slots"),
    [
        ([Tried(1, 90), Tried(2, 95.6), Tried(3, 96)], 2),
        ([Tried(1, 90), Tried(2, 95.6, out_of_memory=0.5)], 1),
    ],
)
def test_the_fewest_slots_near_the_best_are_chosen(tried: list[Any], slots: int) -> None:
    none: Any = Tried(0, 60)
    assert Configuration(scenario(), none, none, tuple(tried)).advised.slots == slots


def memory_gb(slots: int) -> float:
    """GB of a device with even loads and these slots."""
    best = advised(**EVEN).best
    return (best.none.memory.total + slots * MODEL.slot_bytes(training=True)) / GB


def test_memory_limits_the_slots_and_may_make_balancing_necessary() -> None:
    advice = advised(memory_gb=memory_gb(slots=2))
    assert {result.slots for result in advice.best.balanced} == {1, 2}
    assert "at most 2 spare slots" in reasons(advice)
    assert advice.best.none.out_of_memory == 1
    assert advice.best.avoids_out_of_memory
    assert advice.best.advised.slots
    assert "out of memory without balancing: 100%" in reasons(advice)


def test_advice_is_reproducible_and_progress_reaches_its_end() -> None:
    reports: list[tuple[int, int]] = []
    advice = advise(scenario(), report=lambda *counts: reports.append(counts))
    assert advice == advised()
    assert reports == sorted(reports)
    assert reports[-1][0] == reports[-1][1]
