"""advise: recommended settings, verdicts, and reasons."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from ultraep.topology import Topology
from ultraep_tools.sim.advise import Advice, Option, advise, choose
from ultraep_tools.sim.cluster import load_cluster
from ultraep_tools.sim.scenario import Scenario
from ultraep_tools.sim.training import Training
from ultraep_tools.sim.workload import fit_skew

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


def test_strong_skew_pays():
    advice = advised(imbalance=1.8)
    assert advice.verdict == "pays"
    assert advice.slots == advice.option.slots >= 1
    assert advice.tolerance == advice.option.tolerance
    assert advice.gain.low >= 1.05
    assert advice.none.share < advice.option.share <= 1
    assert advice.saved > 2 * advice.exposed > 0
    assert "imbalance without balancing: 1.8" in reasons(advice)


def test_a_slow_rank_costs_less_with_speeds():
    cluster = replace(load_cluster("h200-nvl8"), speeds=[1000, 1000, 800])
    slow = advise(replace(scenario(), cluster=cluster))
    assert (slow.slow_rank.rank, slow.slow_rank.speed) == (2, 800)
    assert 0 < slow.slow_rank.by_speeds < slow.slow_rank.by_rows
    assert "rank 2 computes at 80 % of the nominal speed, which costs" in reasons(slow)
    assert advised().slow_rank is None


def test_even_loads_do_not_pay():
    advice = advised(**EVEN)
    assert (advice.verdict, advice.slots, advice.tolerance) == ("does not pay", 0, 0.0)
    assert advice.option.slots == 1
    assert advice.break_even.tokens is None
    assert "imbalance without balancing: 1.02" in reasons(advice)
    assert "too few tokens" in reasons(advice)


def option(slots: int, tolerance: float, share: float, out_of_memory: float = 0.0) -> Option:
    return Option(slots, tolerance, 100 * share, share, share, 1.0, 1.0, 1.0, out_of_memory)


def test_the_fewest_slots_near_the_best_are_chosen():
    tried = (option(1, 0, 0.90), option(2, 0, 0.956), option(2, 0.01, 0.954), option(3, 0, 0.96))
    assert choose(tried, 0.0) == tried[1]
    assert choose(tried[:2], 0.0) == tried[1]


def memory_gb(slots: int) -> float:
    """GB of a device with even loads and these slots."""
    return (advised(**EVEN).memory.none + slots * MODEL.slot_bytes(training=True)) / GB


def test_memory_limits_the_slots_and_may_make_balancing_necessary():
    advice = advised(memory_gb=memory_gb(slots=2))
    assert {o.slots for o in advice.options} == {1, 2}
    assert "at most 2 spare slots" in reasons(advice)
    assert advice.memory.none_out_of_memory == 1
    assert advice.memory.avoids_out_of_memory
    assert advice.verdict == "pays"
    assert "out of memory without balancing: 100%" in reasons(advice)


def test_advice_is_reproducible_and_progress_reaches_its_end():
    reports: list[tuple[int, int]] = []
    advice = advise(scenario(), report=lambda *counts: reports.append(counts))
    assert advice == advised()
    assert reports == sorted(reports)
    assert reports[-1][0] == reports[-1][1]
