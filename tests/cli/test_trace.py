"""`ultraep trace`: summaries, replays and exports."""

import json

import numpy as np
import pytest
from traces import TOPOLOGY, plan_for, record

import ultraep
from ultraep import BalanceConfig, Recorder, read_trace
from ultraep.passes import Passes, PassLog
from ultraep.runtime.flight import Flight

from . import commands
from .commands import assert_one_line


def invoke(*words):
    return commands.invoke("trace", *words, width=120)


def shown(*words):
    return commands.output("trace", *words, width=120)


@pytest.fixture
def run(tmp_path):
    plans = [plan_for(seed) for seed in range(6)]
    return record(tmp_path / "run", plans, layers=2, note="a Tuesday")


def test_info(run):
    text, trace = shown("info", run), read_trace(run)
    for part in (
        f"{run}: 6 records, 2 ranks, 4 experts, 1 spare slot each",
        "policy ultraep, tolerance 0, recorded 2",
        "3 steps, 0 to 2; ",
        "a Tuesday",
    ):
        assert part in text
    assert "dropped" not in text
    assert "left out" not in text
    rows = [line.split() for line in text.splitlines() if line[:3].strip() in ("0", "1", "all")]
    assert [row[:2] for row in rows] == [["0", "3"], ["1", "3"], ["all", "6"]]
    assert float(rows[2][2]) == pytest.approx(trace.imbalance_before.mean(), abs=5e-4)
    assert float(rows[2][5]) == pytest.approx(trace.imbalance_after.max(), abs=5e-4)


def test_info_lists_missing_records(tmp_path, monkeypatch):
    plans = [plan_for(seed) for seed in range(3)]
    record(tmp_path / "run", plans, ranks={1: 2})
    with Recorder(tmp_path / "run", TOPOLOGY) as recorder:
        for step, plan in enumerate(plans):
            recorder.add(plan=plan, slot_rows=[1, 2, 3], step=step, seconds={"plan": 0.002})
        recorder._writer.dropped = 1234
    text = shown("info", tmp_path / "run")
    assert "1,234 records or additions were dropped" in text
    assert "1 record left out: not recorded by all ranks" in text
    assert "ms of the slowest rank, mean: plan 2.000" in text


def test_replay_repeats_the_recorded_plans(run):
    text = shown("replay", run)
    assert "Replay as recorded: all 6 plans are equal." in text
    table = text[text.index("policy   EP") :].splitlines()
    assert [line.split()[0] for line in table[2:]] == ["none", "quota", "ultraep"]


def test_replay_under_other_settings(run):
    replayed = json.loads(
        shown(
            *("replay", run, "--policy", "none,eplb,ultraep", "--slots", "0,2", "--ep", "1,2,4"),
            *("--history", "1,2", "--tolerance", "0.02", "--json"),
        )
    )
    assert replayed["differing"] == []
    lines = replayed["replayed"]
    assert len(lines) == 3 * 2 * (1 + 2 + 1)
    assert {line["tolerance"] for line in lines} == {0.02}
    by_name = {(x["policy"], x["ranks"], x["slots"], x["history"]): x for x in lines}
    trace = read_trace(run)
    none = by_name["none", 2, 2, None]
    assert none["imbalance_after"] == pytest.approx(trace.imbalance_before.mean())
    assert by_name["ultraep", 2, 2, None]["imbalance_after"] <= none["imbalance_after"]
    assert by_name["ultraep", 2, 0, None]["copies"] == 0
    assert by_name["none", 1, 0, None]["imbalance_after"] == 1.0
    text = shown("replay", run, "--policy", "eplb", "--ep", "4")
    assert "* some plans exceed the spare slots" in text
    assert "each rank's rows are divided among the new ranks" in text


def forged(policy):
    """Return a plan without replicas that claims to be of a policy."""
    loads = np.array([[9, 0, 1, 0], [9, 0, 0, 1]])
    plan = ultraep.plan(loads, TOPOLOGY, BalanceConfig(policy="none"))
    arrays = (plan.loads, plan.replicas, plan.quotas, plan.split, plan.rank_loads)
    return ultraep.Plan(TOPOLOGY, BalanceConfig(policy=policy), *arrays)


def test_replay_names_plans_that_differ(tmp_path):
    run = record(tmp_path / "run", [plan_for(0), forged("ultraep")])
    result = invoke("replay", run)
    assert result.exit_code == 1
    assert "1 of 2 plans differ, the first in step 1, layer 0; was it" in result.stdout
    assert json.loads(invoke("replay", run, "--json").stdout)["differing"] == [1]


def test_export(run, tmp_path):
    outputs = {name: tmp_path / f"out.{name}" for name in ("csv", "json", "npz")}
    options = ["--csv", outputs["csv"], "--perfetto", outputs["json"], "--npz", outputs["npz"]]
    text = shown("export", run, *options)
    assert text.splitlines() == [f"{path}: 6 records" for path in outputs.values()]
    assert len(outputs["csv"].read_text().splitlines()) == 7
    assert json.loads(outputs["json"].read_text())["traceEvents"]
    again = shown("info", outputs["npz"])
    assert again.split(": ", 1)[1] == shown("info", run).split(": ", 1)[1]


def test_place(tmp_path):
    topology = ultraep.Topology(ranks=4, experts=8, slots=1, domain=2)
    hot = np.array([40, 30, 20, 10, 4, 3, 2, 1])  # the first domain is the home of all hot experts
    plans = [ultraep.plan(np.tile(hot, (4, 1)), topology) for _ in range(4)]
    run, target = record(tmp_path / "run", plans, topology=topology), tmp_path / "homes.json"
    text = shown("place", run, "--out", target)
    written = json.loads(target.read_text())
    assert (written["ranks"], written["domain"]) == (4, 2)
    order = written["orders"]["0"]
    assert sorted(order) == list(range(8))
    busiest = max(hot[order].reshape(2, 4).sum(axis=1)) / (hot.sum() / 2)
    assert [line.split() for line in text.splitlines() if line.startswith("0  ")] == [
        ["0", "1.818", f"{busiest:.3f}"]
    ]
    assert busiest < 1.1
    facts = json.loads(shown("place", run, "--json", "--domain", "1"))
    assert facts["domain"] == 1
    assert_one_line(invoke("place", run, "--domain", "3"), "cannot be placed evenly on 4 ranks")
    shown("place", run, "--out", target)  # its own file is replaced
    target.write_text("{}")
    assert_one_line(invoke("place", run, "--out", target), "is not a placement file")


@pytest.fixture
def crashed(tmp_path, monkeypatch):
    """Rank 0 of two waits for rank 1, which left no file."""
    monkeypatch.setenv("ULTRAEP_FLIGHT", str(tmp_path / "flight"))
    flight = Flight("ab12", 0, 2)
    Passes(4, 9, PassLog(0, flight)).record.at("dispatch")
    flight.write("error")
    flight.close()
    return tmp_path / "flight"


def test_crash(crashed):
    for words in ([crashed], [crashed / "ab12"], []):  # without a folder: by the environment
        text = " ".join(shown("crash", *words).split())
        assert "Rank 1 left no file" in text
        assert "Rank 0 waited in 'dispatch' of layer 4 (step 9, forward) for" in text
        assert "So rank 0 waits for rank 1." in text
    rows = [line.split() for line in shown("crash", crashed, "--table").splitlines()[-2:]]
    assert rows[0][:6] == ["0", "error", "4", "9", "forward", "dispatch"]
    assert rows[1] == ["1", "no", "file"]
