"""`ultraep trace`: what it shows, plans again, writes and refuses."""

import json

import numpy as np
import pytest
from traces import TOPOLOGY, plan_for, record
from typer.testing import CliRunner

import ultraep
import ultraep.tools.cli
from ultraep import BalanceConfig, Recorder, read_trace
from ultraep.tools.cli.commands import load_command
from ultraep.trace import VERSION

from .test_plan import assert_one_line


def invoke(*arguments, width=120):
    environment = {"COLUMNS": str(width), "FORCE_COLOR": None, "TERM": "dumb"}
    return CliRunner().invoke(
        ultraep.tools.cli.app, ["trace", *map(str, arguments)], env=environment
    )


def shown(*arguments, **options):
    result = invoke(*arguments, **options)
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.fixture
def run(tmp_path):
    plans = [plan_for(seed) for seed in range(6)]
    return record(tmp_path / "run", plans, layers=2, note="a Tuesday")


def test_info(run):
    text = shown("info", run)
    assert f"{run}: 6 records, 2 ranks, 4 experts, 1 spare slot each" in text
    assert "policy ultraep, tolerance 0, recorded 2" in text
    assert "3 steps, 0 to 2; " in text
    assert "a Tuesday" in text
    assert "dropped" not in text
    assert "left out" not in text
    rows = [line.split() for line in text.splitlines() if line[:3].strip() in ("0", "1", "all")]
    assert [row[:2] for row in rows] == [["0", "3"], ["1", "3"], ["all", "6"]]
    trace = read_trace(run)
    assert float(rows[2][2]) == pytest.approx(trace.imbalance_before.mean(), abs=5e-4)
    assert float(rows[2][5]) == pytest.approx(trace.imbalance_after.max(), abs=5e-4)


def test_info_as_json(run):
    facts = json.loads(shown("info", run, "--json"))
    trace = read_trace(run)
    assert facts["records"] == 6
    assert facts["layers"] == [0, 1]
    assert facts["imbalance_after"] == trace.imbalance_after.mean()
    assert facts["header"]["version"] == VERSION
    assert (facts["dropped"], facts["left_out"]) == (0, 0)


def test_info_says_what_is_missing(tmp_path, monkeypatch):
    plans = [plan_for(seed) for seed in range(3)]
    record(tmp_path / "run", plans, ranks={1: 2})
    with Recorder(tmp_path / "run", TOPOLOGY) as recorder:
        for step, plan in enumerate(plans):
            recorder.add(plan=plan, slot_rows=[1, 2, 3], step=step, seconds={"plan": 0.002})
        recorder._writer.dropped = 1234
    text = shown("info", tmp_path / "run")
    assert "1,234 records or additions were dropped" in text
    assert "1 record left out: not all ranks have them" in text
    assert "ms of the slowest rank, mean: plan 2.000" in text


def test_info_of_an_empty_trace(tmp_path):
    text = shown("info", record(tmp_path / "run", []))
    assert "0 records" in text
    assert "nothing was recorded" in text
    assert json.loads(shown("info", tmp_path / "run", "--json"))["imbalance_after"] is None
    assert_one_line(invoke("replay", tmp_path / "run"), "nothing to replay")


def test_replay_says_that_the_plans_are_those_recorded(run):
    text = shown("replay", run)
    assert "Planned again as recorded: exactly the 6 recorded plans." in text
    table = text[text.index("policy   EP") :].splitlines()
    assert [line.split()[0] for line in table[2:]] == ["none", "quota", "ultraep"]


def test_replay_under_other_settings(run):
    found = json.loads(
        shown(
            *("replay", run, "--policy", "none,eplb,ultraep", "--slots", "0,2", "--ep", "1,2,4"),
            *("--history", "1,2", "--tolerance", "0.02", "--json"),
        )
    )
    assert found["differing"] == []
    lines = found["replayed"]
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
    assert "* plans beyond the spare slots" in text
    assert "the tokens of a rank are dealt out in turn" in text


def forged(policy):
    """A plan of no policy at all: nothing is copied, as it says."""
    loads = np.array([[9, 0, 1, 0], [9, 0, 0, 1]])
    plan = ultraep.plan(loads, TOPOLOGY, BalanceConfig(policy="none"))
    arrays = (plan.loads, plan.replicas, plan.quotas, plan.split, plan.rank_loads)
    return ultraep.Plan(TOPOLOGY, BalanceConfig(policy=policy), *arrays)


def test_replay_says_which_plans_differ(tmp_path):
    run = record(tmp_path / "run", [plan_for(0), forged("ultraep")])
    result = invoke("replay", run)
    assert result.exit_code == 1
    assert "1 of 2 plans differ, the first in step 1, layer 0; was it" in result.stdout
    assert json.loads(invoke("replay", run, "--json").stdout)["differing"] == [1]
    record(tmp_path / "other", [forged("lplb")] * 3, ranks={0: 3, 1: 2})
    text = invoke("replay", tmp_path / "other").stdout
    assert "records of it are missing" in " ".join(text.split())


def test_export(run, tmp_path):
    outputs = {name: tmp_path / f"out.{name}" for name in ("csv", "json", "npz")}
    options = ["--csv", outputs["csv"], "--perfetto", outputs["json"], "--npz", outputs["npz"]]
    text = shown("export", run, *options)
    assert text.splitlines() == [f"{path}: 6 records" for path in outputs.values()]
    assert len(outputs["csv"].read_text().splitlines()) == 7
    assert json.loads(outputs["json"].read_text())["traceEvents"]
    again = shown("info", outputs["npz"])
    assert again.split(": ", 1)[1] == shown("info", run).split(": ", 1)[1]


REFUSED = {
    "nothing": (["export"], "name what to write: --csv, --perfetto or --npz"),
    "suffix": (["export", "--npz", "run.zip"], "--npz needs a name that ends in .npz, got run.zip"),
    "nowhere": (["export", "--csv", "/none/run.csv"], "cannot be written: No such file"),
    "no policy": (["replay", "--policy", ","], "--policy must name at least one"),
    "slots": (["replay", "--slots", "two"], "--slots must be numbers like 1,2, got 'two'"),
    "ep": (["replay", "--ep", "3"], "2 recorded ranks cannot become 3: one number must divide"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_one_line(run, arguments, message):
    verb, *options = arguments
    assert_one_line(invoke(verb, run, *options), message)


@pytest.mark.parametrize("verb", [["info"], ["replay"], ["export", "--csv", "x.csv"]])
def test_what_is_no_trace_is_one_line(tmp_path, verb):
    name, *options = verb
    assert_one_line(invoke(name, tmp_path / "none", *options), "none: no such file or folder")
    assert_one_line(invoke(name, tmp_path, *options), "holds no trace")


def test_options_are_frozen_and_explained():
    commands = load_command("trace").commands
    names = {
        name: sorted(option for parameter in command.params for option in parameter.opts)
        for name, command in commands.items()
    }
    assert names == {
        "info": ["--json", "path"],
        "replay": [
            *("--ep", "--history", "--json", "--policy", "--slots", "--tolerance"),
            "path",
        ],
        "export": ["--csv", "--force", "--npz", "--perfetto", "path"],
    }
    assert all(parameter.help for command in commands.values() for parameter in command.params)


def test_help_shows_examples():
    for verb in ("info", "replay", "export"):
        assert f"Example: ultraep trace {verb} run/" in shown(verb, "--help")
    assert "ULTRAEP_TRACE=FOLDER" in shown("--help")
