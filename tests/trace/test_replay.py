"""Replays reproduce the recorded plans; other settings give other plans; exports."""

from dataclasses import replace

import numpy as np
import pytest
from traces import record

import ultraep
from ultraep import BalanceConfig, ConfigError, Topology, read_trace, workload
from ultraep_tools import replay

WIDE = Topology(ranks=8, experts=32, slots=2, domain=4)
LAYERS = 3
LOADS = workload.drifting(
    workload.Load("log-normal", 1.5), 8, 32, steps=12, every=4, top_k=4, tokens=100, seed=2
)


def planned(config, topology=WIDE, history=1):
    plans = []
    for number, loads in enumerate(LOADS):
        past = LOADS[max(number - history * LAYERS, number % LAYERS) : max(number, 1) : LAYERS]
        past = past if len(past) else loads[None]
        plans.append(ultraep.plan(loads, topology, config, history=past))
    return plans


@pytest.fixture
def trace(tmp_path):
    return read_trace(record(tmp_path / "run", planned(BalanceConfig()), topology=WIDE, layers=3))


@pytest.mark.parametrize("policy", ["ultraep", "registered", "none"])
@pytest.mark.parametrize("options", [{}, {"tolerance": 0.05, "locality": False}], ids=str)
def test_a_replay_with_the_recorded_settings_gives_the_recorded_plans(tmp_path, policy, options):
    config = BalanceConfig(policy=policy, **options)
    plans = planned(config)
    run = record(tmp_path / "run", plans, topology=WIDE, config=config, layers=LAYERS)
    trace = read_trace(run)
    assert replay.differing(trace) == []
    assert [trace.plan(n).digest() for n in range(12)] == [plan.digest() for plan in plans]
    again = replay.plans(trace, replay.Case(config, WIDE))
    assert [plan.digest() for plan in again] == [plan.digest() for plan in plans]


def test_traces_hold_the_speeds_of_every_record(tmp_path):
    speeds = (1000, 900, 800, 1000, 950, 1000, 1000, 850)
    config = BalanceConfig(objective="balance")
    plans = [
        ultraep.plan(loads, WIDE, replace(config, speeds=speeds if number % 2 else None))
        for number, loads in enumerate(LOADS)
    ]
    run = record(tmp_path / "run", plans, topology=WIDE, config=config, layers=LAYERS)
    trace = read_trace(run)
    assert trace.speeds.tolist() == [list(plan.speed_numbers) for plan in plans]
    assert [trace.speeds_of(n) for n in (0, 1)] == [None, speeds]
    assert replay.differing(trace) == []
    expected = [plan.initial_imbalance for plan in plans]
    np.testing.assert_allclose(trace.imbalance_before, expected, rtol=1e-5)
    again = replay.plans(trace, replay.Case(config, WIDE, None))
    assert [plan.digest() for plan in again] == [plan.digest() for plan in plans]
    four = Topology(ranks=4, experts=32, slots=2)
    assert all(not plan.speeds for plan in replay.plans(trace, replay.Case(config, four, None)))


def test_the_means_are_over_all_records(trace):
    [case] = replay.cases(trace, policies=["quota"], slots=[1], ranks=[8], history=[4])
    assert case.history is None
    plans = planned(BalanceConfig(policy="quota"), Topology(ranks=8, experts=32, slots=1, domain=4))
    assert replay.replayed(trace, case).means() == pytest.approx(
        {
            "before": np.mean([plan.initial_imbalance for plan in plans]),
            "after": np.mean([plan.imbalance for plan in plans]),
            "bound": np.mean([plan.lower_bound for plan in plans]),
            "copies": np.mean([plan.num_replicas for plan in plans]),
            "remote": np.mean([plan.remote_tokens / plan.total for plan in plans]),
            "worst": max(plan.imbalance for plan in plans),
            "beyond": 0,
        }
    )


def test_fewer_and_more_ranks(trace):
    for ranks in (1, 2, 4, 16, 32):
        [case] = replay.cases(trace, policies=["ultraep"], slots=[1], ranks=[ranks], history=[1])
        for recorded, plan in zip(trace.loads, replay.plans(trace, case), strict=True):
            plan.check(plan.loads)
            assert plan.topology.ranks == ranks
            assert plan.loads.sum(axis=0).tolist() == recorded.sum(axis=0).tolist()
            tokens = plan.loads.sum(axis=1)
            assert tokens.max() - tokens.min() <= 1


def test_homes_stay_with_their_ranks():
    topology = Topology(ranks=4, experts=8, homes=[3, 3, 2, 0, 0, 0, 1, 2])
    assert replay.regrouped_topology(topology, ranks=4, slots=2).homes == topology.homes
    with pytest.raises(ConfigError, match="homes of their own, so 4 ranks cannot be changed"):
        replay.regrouped_topology(topology, ranks=2, slots=1)


REFUSED = {
    "ranks": ({"ranks": [3]}, "8 recorded ranks cannot become 3: one number must divide"),
    "no ranks": ({"ranks": [0]}, "cannot become 0"),
    "experts": ({"ranks": [64]}, "32 experts do not divide evenly over 64 ranks"),
    "slots": ({"slots": [99]}, "slots must lie between 0 and 32, got 99"),
    "policy": ({"policies": ["magic"]}, "unknown policy 'magic'"),
    "history": ({"history": [0]}, "history must be at least 1 microbatch, got 0"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_settings_are_refused(trace, changes, message):
    usual = {"policies": ["none"], "slots": [1], "ranks": [8], "history": [1]}
    with pytest.raises(ConfigError, match=message):
        replay.cases(trace, **(usual | changes))


def test_a_trace_without_records(tmp_path):
    trace = read_trace(record(tmp_path / "run", []))
    assert replay.differing(trace) == []
    [case] = replay.cases(trace, policies=["none"], slots=[1], ranks=[2], history=[1])
    with pytest.raises(ConfigError, match="nothing to replay"):
        replay.replayed(trace, case)
