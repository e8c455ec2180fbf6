"""The simulator's plans equal the runtime's plans."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from cases import small_problems
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraep import BalanceConfig, Plan, Topology, plan
from ultraep.hops import hops
from ultraep_tools.sim.planning import Replicas, plan_layer

EXACT = ("none", "ultraep", "quota")
BY_PAST = ("eplb", "lplb")
reproducibly = settings(derandomize=True, database=None, deadline=None, max_examples=60)


def plan_all(
    loads_SRE: Any, topology: Topology, policy: str, interval: int = 1, past: Any = None
) -> tuple[Replicas, list[Plan]]:
    config, loads_SE = BalanceConfig(policy=policy), loads_SRE.sum(axis=1)
    past_E = np.zeros(topology.experts, dtype=np.int64) if past is None else past
    replicas = plan_layer(loads_SE, topology, config, interval=interval, past_E=past_E)
    plans = []
    for number, loads_RE in enumerate(loads_SRE):
        begin = number // interval * interval
        history = loads_SE[begin - interval : begin] if begin else past_E
        plans.append(plan(loads_RE, topology, config, history=history))
    return replicas, plans


def check_same(replicas: Replicas, plans: list[Plan]) -> None:
    placed = [replicas.microbatch, replicas.expert, replicas.host, replicas.rows]
    expected = [
        [number, expert, host, quota]
        for number, own in enumerate(plans)
        for (expert, host, _), quota in zip(own.replicas.tolist(), own.quotas, strict=True)
    ]
    assert sorted(np.column_stack(placed).tolist()) == sorted(expected)
    assert replicas.rank_loads.tolist() == [own.rank_loads.tolist() for own in plans]


@pytest.mark.parametrize("policy", EXACT)
@given(case=small_problems(microbatches=4))
@reproducibly
def test_exact_policies_plan_every_microbatch_like_the_runtime(policy: str, case: Any) -> None:
    check_same(*plan_all(*case, policy))


@pytest.mark.parametrize("policy", BY_PAST)
@given(case=small_problems(microbatches=4), interval=st.integers(1, 3), quiet=st.booleans())
@reproducibly
def test_placements_use_the_interval_before(
    policy: str, case: Any, interval: int, quiet: bool
) -> None:
    past_E = np.arange(case[1].experts)[::-1] * (0 if quiet else 100)
    check_same(*plan_all(*case, policy, interval, past_E))


@pytest.mark.parametrize("policy", ["ultraep", "quota"])
@given(case=small_problems(microbatches=4))
@reproducibly
def test_experts_are_sent_like_in_the_runtime(policy: str, case: Any) -> None:
    replicas, plans = plan_all(*case, policy)
    topology = replicas.topology
    sent = {mode: replicas.sent(chain=mode == "chain") for mode in ("direct", "chain")}
    received, per_expert = replicas.received(), replicas.per_expert()
    for number, own in enumerate(plans):
        for mode, sent_SR in sent.items():
            path = hops(own, mode)
            assert counts((hop.sender for hop in path), topology.ranks) == sent_SR[number].tolist()
        assert counts((hop.receiver for hop in path), topology.ranks) == received[number].tolist()
        assert counts((hop.expert for hop in path), topology.experts) == per_expert[number].tolist()


def counts(indices: Any, size: int) -> list[int]:
    counter = Counter(indices)
    return [counter[index] for index in range(size)]
