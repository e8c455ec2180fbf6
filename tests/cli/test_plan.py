"""`ultraep plan`: its table, its JSON, and the files that it reads."""

import re

import numpy as np
import pytest

import ultraep
from ultraep import workload
from ultraep_tools.cli.plan import PLAN_NUMBERS

from .commands import output, records

RANKS, EXPERTS, STEPS = 8, 32, 3
SEQUENCE = workload.drifting(
    workload.Load("log-normal", 2.0), RANKS, EXPERTS, steps=STEPS, every=1, top_k=4, tokens=200
)


@pytest.fixture
def npy(tmp_path):
    return save(tmp_path / "loads.npy", SEQUENCE[0])


@pytest.fixture
def sequence(tmp_path):
    return save(tmp_path / "sequence.npy", SEQUENCE)


def save(path, loads):
    np.save(path, np.asarray(loads))
    return path


def test_json_equals_the_plans_of_the_library(sequence):
    lines = records("plan", sequence, "--slots", "2", "--domain", "4", "--tolerance", "0.02")
    topology = ultraep.Topology(ranks=RANKS, experts=EXPERTS, slots=2, domain=4)
    config = ultraep.BalanceConfig(tolerance=0.02)
    assert [line["microbatch"] for line in lines] == list(range(STEPS))
    for line, loads in zip(lines, SEQUENCE, strict=True):
        plan = ultraep.plan(loads, topology, config)
        plan_us = line.pop("plan_us")
        assert 0 < plan_us < 1e8
        numbers = {name: getattr(plan, name) for name in PLAN_NUMBERS}
        assert line == numbers | {
            "microbatch": line["microbatch"],
            "policy": "ultraep",
            "total_tokens": int(loads.sum()),
            "digest": plan.digest(),
            "rank_loads": plan.rank_loads.tolist(),
            "replicas": np.column_stack([plan.replicas, plan.quotas]).tolist(),
        }


def table_of(text):
    """Return the cells of every line of the table, which ends in a share and a time."""
    _, _, below = text.partition("───\n")
    return [line.split() for line in below.splitlines() if re.search(r"%\s+[\d.]+$", line)]


def test_numbers_in_the_table_are_those_of_the_plan(npy):
    (line,) = records("plan", npy)
    (cells,) = table_of(output("plan", npy))
    ratios = [f"{line[name]:.3f}" for name in ("initial_imbalance", "imbalance", "lower_bound")]
    assert cells[:5] == ["ultraep", *ratios, str(line["num_replicas"])]
    assert cells[7] == f"{line['remote_tokens'] / line['total_tokens']:.1%}"


def test_policies_are_compared_with_footnotes(sequence):
    text = output("plan", sequence, "--policy", "none,ultraep,eplb,ultraep", width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert [cells[0] for cells in table_of(text)] == ["none", "ultraep", "eplb*"]
    words = " ".join(text.split())
    assert f"mean of {STEPS} microbatches, worst in parentheses" in words
    assert f"* eplb: 3 of {STEPS} plans exceed the spare slots" in words


def test_policies_plan_from_the_requested_history(sequence):
    lines = records("plan", sequence, "--policy", "eplb", "--history", 2)
    topology = ultraep.Topology(ranks=RANKS, experts=EXPERTS)
    config = ultraep.BalanceConfig(policy="eplb")
    for number, line in enumerate(lines):
        past = np.asarray(SEQUENCE[max(number - 2, 0) : max(number, 1)])
        plan = ultraep.plan(SEQUENCE[number], topology, config, history=past)
        assert line["digest"] == plan.digest()
