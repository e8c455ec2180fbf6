"""`ultraep plan`: its table, its JSON, and the files that it reads."""

import re

import numpy as np
import pytest
from traces import plan_for, record

import ultraep
from ultraep import read_trace, workload
from ultraep_tools.cli.plan import PLAN_NUMBERS, PlanOptions, read_layers

from .commands import flat, invoke, output, records

RANKS, EXPERTS, STEPS = 8, 32, 3
SEQUENCE = workload.topic_shift(RANKS, EXPERTS, steps=STEPS, top_k=4, tokens=200, seed=1)


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
            "layer": 0,
            "policy": "ultraep",
            "total_tokens": int(loads.sum()),
            "time_ps": None,
            "time_without_copies_ps": None,
            "digest": plan.digest(),
            "rank_loads": plan.rank_loads.tolist(),
            "replicas": np.column_stack([plan.replicas, plan.quotas]).tolist(),
        }


def test_rates_decide_which_replicas_pay(npy):
    """Expensive replicas do not pay; free replicas give the plan without rates."""
    expensive = "row=10,copy=1000000000000"
    (left,) = records("plan", npy, "--rates", expensive)
    assert left["num_replicas"] == 0
    assert left["time_ps"] == left["time_without_copies_ps"] == 10 * max(left["rank_loads"])
    (free,), (default,) = records("plan", npy, "--rates", "row=10"), records("plan", npy)
    assert free["digest"] == default["digest"]
    assert free["time_ps"] < free["time_without_copies_ps"] == left["time_ps"]
    assert "1 of 1 without replicas, which would not pay" in flat("plan", npy, "--rates", expensive)


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


LAYERS, ROUTED_EXPERTS = 3, 8


@pytest.fixture
def routing(tmp_path):
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, ROUTED_EXPERTS, (tokens, LAYERS, 2)) for tokens in (50, 90)]
    path = tmp_path / "routing.npz"
    np.savez(path, one_ids=texts[0], one_seq_lens=np.array([50]), two_ids=texts[1])
    return path


@pytest.fixture
def loads(routing):
    """The loads of the recorded routing, layer by layer."""
    sizes = {"ranks": 4, "experts": ROUTED_EXPERTS, "tokens": 20}
    windows = [workload.loads_of_windows(ids, **sizes) for ids in workload.read_routing(routing)]
    return np.concatenate(windows).swapaxes(0, 1)


def test_recorded_routing_is_planned_layer_by_layer(routing, loads):
    options = (routing, "--ranks", 4, "--window", 20)
    np.testing.assert_array_equal(read_layers(PlanOptions(file=routing, ranks=4, window=20)), loads)
    text = flat("plan", *options, "--policy", "eplb,ultraep")
    assert "3 layers, 18 microbatches of 40 rows, 4 ranks, 8 experts" in text
    lines = iter(records("plan", *options, "--policy", "eplb", "--history", 2))
    topology, config = ultraep.Topology(ranks=4, experts=8), ultraep.BalanceConfig(policy="eplb")
    for layer, number in np.ndindex(LAYERS, 6):
        past = loads[layer, max(number - 2, 0) : max(number, 1)]
        plan = ultraep.plan(loads[layer, number], topology, config, history=past)
        line = next(lines)
        assert (line["layer"], line["digest"]) == (layer, plan.digest())


def test_a_trace_is_planned_by_layer(tmp_path):
    plans = [plan_for(seed) for seed in range(6)]
    folder = record(tmp_path / "run", plans, layers=2)
    read_trace(folder).save(tmp_path / "run.npz")
    for path in (folder, tmp_path / "run.npz"):
        expected = [[plans[index].loads for index in layer] for layer in ((0, 2, 4), (1, 3, 5))]
        np.testing.assert_array_equal(read_layers(PlanOptions(file=path)), expected)
        assert invoke("plan", path).exit_code == 0
