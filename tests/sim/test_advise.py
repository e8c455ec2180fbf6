"""advise: what it recommends, when it says that balancing does not pay, and why."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from ultraep.tools.sim.advise import (
    TOLERANCES,
    Advice,
    Option,
    advise,
    choose,
    verdict_of,
)
from ultraep.tools.sim.cluster import load_cluster
from ultraep.tools.sim.gain import DRAWS, break_even
from ultraep.tools.sim.memory import slot_bytes
from ultraep.tools.sim.model import load_model
from ultraep.tools.sim.run import simulate
from ultraep.tools.sim.scenario import Scenario
from ultraep.tools.sim.serving import Serving, load_requests
from ultraep.tools.sim.training import Training
from ultraep.tools.sim.workload import Recorded, fit_skew
from ultraep.topology import Topology

RANKS = 8
MODEL = replace(load_model("gpt-oss-20b"), layers=6)
GB = 1e9


@cache
def made(
    imbalance: float = 1.6,
    noise: float = 0.25,
    tokens: int = 8192,
    memory_gb: float = 141,
    **changes: object,
) -> Scenario:
    topology = Topology(ranks=RANKS, experts=MODEL.experts)
    cluster = replace(load_cluster("h200-nvl8"), memory_gb=memory_gb)
    scenario = Scenario(
        cluster=cluster,
        model=MODEL,
        workload=fit_skew(imbalance, topology, MODEL.top_k, range(MODEL.layers), noise=noise),
        job=Training(tokens=tokens, microbatches=4, steps=1),
        ranks=RANKS,
    )
    return replace(scenario, **changes)


@cache
def advised(**changes: object) -> Advice:
    return advise(made(**changes))


def prefill(**changes: object) -> Scenario:
    requests = replace(load_requests("stem"), limit_s=0.1)
    return replace(made(**changes), job=Serving(requests=requests, iterations=6))


def recorded() -> Scenario:
    loads = np.random.default_rng(3).zipf(1.6, (5, MODEL.layers, MODEL.experts)).clip(1, 400)
    return replace(made(), workload=Recorded(loads, MODEL.top_k))


def said(advice: Advice) -> str:
    return " ".join(advice.reasons)


# -- verdicts ------------------------------------------------------------------------------------


def test_strong_skew_pays():
    found = advised(imbalance=1.8)
    assert found.verdict == "pays"
    assert found.slots == found.option.slots >= 1
    assert found.tolerance == found.option.tolerance
    assert found.gain.low >= 1.05
    assert found.none.share < found.option.share <= 1
    assert found.saved > 2 * found.exposed > 0
    assert "imbalance without balancing: 1.8" in said(found)


def test_even_loads_do_not_pay_and_it_says_why():
    found = advised(imbalance=1.02, noise=0.01)
    assert (found.verdict, found.slots, found.tolerance) == ("does not pay", 0, 0.0)
    assert found.option.slots == 1
    assert "imbalance without balancing: 1.02" in said(found)
    assert found.break_even.tokens is None
    assert "too few tokens" in said(found)


def test_few_tokens_do_not_pay_and_it_says_from_where_on():
    found = advised(tokens=128)
    assert found.verdict == "does not pay"
    assert found.gain.high < 1
    assert found.break_even.tokens > 128
    assert found.exposed > found.saved
    assert "too few tokens per rank and microbatch: 128" in said(found)


def test_a_domain_of_one_rank_has_no_place_for_copies():
    found = advised(domain=1)
    assert (found.verdict, found.slots, found.option, found.options) == (
        "does not pay",
        0,
        None,
        (),
    )
    assert (found.gain.overall, found.gain.low, found.gain.high) == (1, 1, 1)
    assert "one rank" in said(found)


@pytest.mark.parametrize(
    ("gain", "low", "expected"),
    [
        (1.3, 1.05, "pays"),
        (1.3, 1.04, "pays a little"),
        (1.01, 0.9, "pays a little"),
        (1.009, 1.0, "does not pay"),
        (0.4, 0.3, "does not pay"),
    ],
)
def test_verdicts_follow_the_gain(gain, low, expected):
    assert verdict_of(gain, low, avoids_out_of_memory=False) == expected
    assert verdict_of(gain, low, avoids_out_of_memory=True) == "pays"


# -- settings ------------------------------------------------------------------------------------


def option(slots: int, tolerance: float, share: float, out_of_memory: float = 0.0) -> Option:
    return Option(slots, tolerance, 100 * share, share, share, 1.0, 1.0, 1.0, out_of_memory)


def test_the_fewest_slots_near_the_best_are_chosen():
    tried = (option(1, 0, 0.90), option(2, 0, 0.956), option(2, 0.01, 0.954), option(3, 0, 0.96))
    assert choose(tried, 0.0) == tried[1]
    assert choose(tried[:2], 0.0) == tried[1]


def test_settings_that_need_more_memory_than_none_are_not_chosen():
    tried = (option(1, 0, 0.9), option(2, 0, 0.99, out_of_memory=0.5))
    assert choose(tried, 0.0) == tried[0]
    assert choose(tried, 0.5) == tried[1]
    assert choose(tried[1:], 0.25) is None


def test_all_settings_are_what_simulate_says():
    found = advised()
    settings = [(slots, tolerance) for slots in range(1, 5) for tolerance in TOLERANCES]
    assert [(o.slots, o.tolerance) for o in found.options] == settings
    scenario = replace(made(), slots=2, tolerance=0.02)
    none, own, ideal = simulate(scenario, ["none", "ultraep", "ideal"])
    picked = found.options[settings.index((2, 0.02))]
    assert picked.throughput == own.throughput
    assert picked.share == own.throughput / ideal.throughput
    assert found.none.throughput == none.throughput


# -- gain ----------------------------------------------------------------------------------------


def test_the_range_covers_microbatches_and_seeds():
    gain = advised().gain
    assert len(gain.draws) == len(set(gain.draws)) == DRAWS
    assert gain.draws[0] == gain.overall == advised().option.gain
    every = (*gain.draws, *gain.microbatches)
    assert (gain.low, gain.high) == (min(every), max(every))


def test_a_trace_has_no_seeds():
    found = advise(recorded())
    assert found.gain.draws == (found.gain.overall,)
    assert found.gain.low <= found.gain.overall <= found.gain.high


def test_prefill_is_about_the_rate_at_the_limit():
    found = advise(prefill(imbalance=2.5))
    assert (found.job, found.unit) == ("prefill", "requests/s")
    assert found.gain.low <= found.gain.overall <= found.gain.high
    assert found.verdict == "pays"
    assert "per iteration" in found.remainder
    assert found.memory.slot == slot_bytes(MODEL, training=False)


# -- break-even ----------------------------------------------------------------------------------


def test_break_even_is_always_never_or_for_good():
    falling = ((64, 1.1), (128, 0.9), (256, 0.99), (512, 1.01))
    assert break_even(falling, 0.5).always
    assert break_even(falling, 0.5).tokens == 64
    assert break_even(falling, 1.05).tokens is None
    assert break_even(falling, 1.0).tokens == pytest.approx(256 * 2**0.5)


# -- memory --------------------------------------------------------------------------------------


def needed(slots: int = 0) -> float:
    """GB of a device with even loads."""
    slot = slot_bytes(MODEL, training=True)
    even = advised(imbalance=1.02, noise=0.01).memory.none / GB
    return even + slots * slot / GB


def test_slots_are_limited_by_memory():
    found = advised(memory_gb=needed(slots=2))
    assert {o.slots for o in found.options} == {1, 2}
    assert "at most 2 spare slots" in said(found)


def test_balancing_may_be_what_makes_it_fit():
    found = advised(memory_gb=needed(slots=2))
    assert found.memory.none_out_of_memory == 1
    assert found.memory.avoids_out_of_memory
    assert found.verdict == "pays"
    assert "out of memory without balancing: 100%" in said(found)


def test_no_slot_fits():
    found = advised(memory_gb=needed() - 0.05)
    assert (found.verdict, found.option, found.slots) == ("does not pay", None, 0)
    assert "no spare slot fits" in said(found)
    assert "out of memory without balancing" in said(found)


# -- the rest ------------------------------------------------------------------------------------


def test_advice_is_the_same_every_time_and_for_any_number_of_processes():
    assert advise(made()) == advised()
    assert advise(recorded(), processes=2) == advise(recorded())


def test_progress_reaches_its_end():
    for scenario in (made(), recorded()):
        seen: list[tuple[int, int]] = []
        advise(scenario, report=lambda done, total, seen=seen: seen.append((done, total)))
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1]
