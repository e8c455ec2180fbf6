"""`ultraep trace`: summaries, replays and exports."""

import json

import numpy as np
import pytest
from traces import TOPOLOGY, plan_for, record

import ultraep
from ultraep import BalanceConfig, CommunicationError, Recorder, read_trace
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
    before, after = trace.imbalance_before, trace.imbalance_after
    assert text.startswith(f"imbalance {before.mean():.2f} -> {after.mean():.2f} ")
    for part in (
        f"{run}: 6 records, 2 ranks, 4 experts, 1 spare slot each",
        "policy ultraep, tolerance 0, recorded 2",
        "3 steps, 0 to 2; ",
        "a Tuesday",
    ):
        assert part in text
    assert "dropped" not in text
    assert "left out" not in text
    rows = [line.split() for line in text.splitlines() if line.startswith("ultraep ")]
    assert [row[1:3] for row in rows] == [["0", "3"], ["1", "3"], ["all", "6"]]
    assert float(rows[2][3]) == pytest.approx(before.mean(), abs=5e-4)
    assert float(rows[2][6]) == pytest.approx(after.max(), abs=5e-4)


def test_info_separates_policies(tmp_path):
    """A check without balancing, as in examples/first.py, changes no mean of the run."""
    rates = ultraep.Rates(row=83_000_000, copy=3_000_000, each=400_000)
    config = BalanceConfig(rates=rates)
    alone = BalanceConfig(policy="none", rates=rates)
    plans = [plan_for(0, config=each) for each in (config, alone)]
    run = record(tmp_path / "run", plans, config=config, seconds={"experts": 0.002})
    text, balanced = shown("info", run), plans[0]
    change = f"{balanced.initial_imbalance:.2f} -> {balanced.imbalance:.2f}"
    assert text.startswith(f"imbalance {change} (busiest rank over mean rank)")
    assert "rates in microseconds: row 83, copy 3, each 0.4, layer 0\n" in text
    rows = [line.split() for line in text.splitlines()]
    assert [row[:3] for row in rows if row and row[0] in ("ultraep", "none")] == [
        ["ultraep", "0", "1"],
        ["none", "0", "1"],
    ]
    assert ["stage", "ultraep", "none", "all"] in rows
    assert ["experts", "2.00", "2.00", "2.00"] in rows


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
    assert ["plan", "2.00"] in [line.split() for line in text.splitlines()]


def test_replay_repeats_the_recorded_plans(run):
    text = shown("replay", run)
    assert "Replay as recorded: all 6 plans are equal." in text
    table = text[text.index("policy   EP") :].splitlines()
    assert [line.split()[0] for line in table[2:]] == ["none", "quota", "ultraep"]


def test_replay_under_other_settings(run):
    replayed = json.loads(
        shown(
            *("replay", run, "--policy", "none,eplb,ultraep", "--slots", "0,2", "--ep", "1,2,4"),
            *("--history", "1,2", "--json"),
        )
    )
    assert replayed["differing"] == []
    lines = replayed["replayed"]
    assert len(lines) == 3 * 2 * (1 + 2 + 1)
    by_name = {(x["policy"], x["ranks"], x["slots"], x["history"]): x for x in lines}
    trace = read_trace(run)
    none = by_name["none", 2, 2, None]
    assert none["after"] == pytest.approx(trace.imbalance_before.mean())
    assert by_name["ultraep", 2, 2, None]["after"] <= none["after"]
    assert by_name["ultraep", 2, 0, None]["copies"] == 0
    assert by_name["none", 1, 0, None]["after"] == 1.0
    text = shown("replay", run, "--policy", "eplb", "--ep", "4")
    assert "* some plans exceed the spare slots" in text
    assert "each rank's rows are divided among the new ranks" in text


def forged(policy):
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
    out = tmp_path / "out.npz"
    assert shown("export", run, "--npz", out).splitlines() == [f"{out}: 6 records"]
    again = shown("info", out)
    assert again.split(": ", 1)[1] == shown("info", run).split(": ", 1)[1]


def placed(tmp_path, first, second, **options):
    topology = ultraep.Topology(ranks=4, experts=8, slots=1, **options)
    loads = [np.tile(half, (4, 1)) for half in (first, first, second, second)]
    plans = [ultraep.plan(each, topology) for each in loads]
    return record(tmp_path / "run", plans, topology=topology)


HOT_FIRST = np.array([40, 30, 20, 10, 4, 3, 2, 1])  # domain 0 is the home of all hot experts


def test_place(tmp_path):
    run, target = placed(tmp_path, HOT_FIRST, HOT_FIRST, domain=2), tmp_path / "homes.json"
    text = shown("place", run, "--out", target)
    written = json.loads(target.read_text())
    assert (written["ranks"], written["domain"]) == (4, 2)
    order = written["orders"]["0"]
    assert sorted(order) == list(range(8))
    busiest = max(HOT_FIRST[order].reshape(2, 4).sum(axis=1)) / (HOT_FIRST.sum() / 2)
    assert busiest < 1.1
    assert text.startswith(f"busiest domain 1.818 -> {busiest:.3f} of the mean domain: new order")
    assert ["0", "1.818", f"{busiest:.3f}", "new"] in [line.split() for line in text.splitlines()]
    assert_one_line(invoke("place", run, "--out", target), "homes.json: exists")


def test_place_keeps_an_order_whose_forecast_is_not_better(tmp_path):
    """Experts that were hot in the first half are cold in the second half."""
    second = np.array([20, 1, 1, 20, 20, 1, 1, 20])
    run, target = placed(tmp_path, HOT_FIRST, second, domain=2), tmp_path / "homes.json"
    text = shown("place", run, "--out", target)
    assert text.startswith("keep all experts in their order: no layer has a better forecast\n")
    assert json.loads(target.read_text())["orders"] == {"0": list(range(8))}
    [row] = [line.split() for line in text.splitlines() if line.startswith("0 ")]
    assert (row[1], row[3]) == ("1.000", "kept")


def test_place_refuses_what_has_no_placement(tmp_path):
    run, target = placed(tmp_path, HOT_FIRST, HOT_FIRST), tmp_path / "homes.json"
    assert_one_line(invoke("place", run, "--out", target), "all 4 ranks are one domain")
    for domain in ("3", "0"):
        message = "cannot be placed evenly on 4 ranks"
        assert_one_line(invoke("place", run, "--domain", domain, "--out", target), message)
    assert not target.exists()
    once = record(tmp_path / "once", [plan_for(0)])
    assert_one_line(invoke("place", once, "--domain", "1"), "at least two records of every layer")


@pytest.fixture
def crashed(tmp_path, monkeypatch):
    monkeypatch.setenv("ULTRAEP_FLIGHT", str(tmp_path / "flight"))
    flight = Flight("ab12", 0, 2)
    Passes(4, 9, PassLog(0, flight)).record.at("dispatch")
    flight.failed(CommunicationError("rank 1 did not reach this call, as far as rank 0 can tell"))
    flight.close()
    return tmp_path / "flight"


def test_crash(crashed):
    for words in ([crashed], [crashed / "ab12"], []):  # without a folder: by the environment
        text = commands.output("trace", "crash", *words, width=80)
        lines = [line.rstrip() for line in text.splitlines()]
        assert max(map(len, lines)) <= 80
        heading = " ".join(text[: text.index("  Rank")].split())
        assert f"{crashed}/ab12: files of 1 of 2 ranks, 2" in heading
        assert "  Rank 0 waits for rank 1." in lines
        assert (
            "    CommunicationError: rank 1 did not reach this call, as far as rank 0 can" in text
        )
        flat = " ".join(text.split())
        assert "Rank 1 left no file" in flat
        assert "Rank 0 waited in 'dispatch' of layer 4 (step 9, forward) for 0.0 s, since " in flat
