"""`ultraep simulate`: what it answers, refuses, prints and writes."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import ultraep.tools.cli
from ultraep import workload
from ultraep.tools.cli import scenario, simulate
from ultraep.tools.cli.options import ScenarioOptions
from ultraep.tools.sim.run import simulate as run_simulation

EXPERTS, RANKS = 32, 8
SMALL = ("--cluster", "h200-nvl8", "--model", "gpt-oss-20b", "--ep", RANKS, "--processes", 1)
WHERE = {"cluster": "h200-nvl8", "model": "gpt-oss-20b", "ep": RANKS}
QUICK = (*SMALL, "--interval", 4)
TRAINING = (*QUICK, "--steps", 1, "--microbatches", 3)
CLUSTER = """
[mine]
title = "a small cluster"
source = "made up"
devices = 16
domain = 4
memory_gb = {memory}
matmul_tflops = 900
memory_gb_s = 4000
link_gb_s = 400
link_us = 3
network_gb_s = 50
network_us = 8
"""
REQUESTS = """
[slow]
title = "long prompts, no patience"
mean_tokens = 50000
spread = 0.1
limit_s = 0.00001
[none]
title = "no prompts"
mean_tokens = 0
spread = 0.1
limit_s = 1
"""


def invoke(*arguments, width=100):
    environment = {"COLUMNS": str(width), "FORCE_COLOR": None, "TERM": "dumb"}
    return CliRunner().invoke(
        ultraep.tools.cli.app, ["simulate", *map(str, arguments)], env=environment
    )


def rows(*arguments):
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def text(path, content):
    path.write_text(content)
    return path


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "loads.npy"
    np.save(path, workload.topic_shift(RANKS, EXPERTS, steps=6, top_k=4, tokens=200, seed=1))
    return path


# -- what it answers -----------------------------------------------------------------------------


def test_json_has_a_row_for_every_policy_that_fits_together():
    found = rows(*TRAINING, "--policy", "ultraep,none,ideal", "--seed", 3)
    assert [row["policy"] for row in found] == ["ultraep", "none", "ideal"]
    ours, none, ideal = found
    for row in found:
        assert row["share_of_ideal"] == row["throughput"] / ideal["throughput"]
        assert row["gain_over_none"] == row["throughput"] / none["throughput"]
        assert row["seconds"] == pytest.approx(sum(row["stages"].values()))
        *parts, total = row["memory_gb"].values()
        assert sum(parts) == pytest.approx(total)
        assert row["unit"] == "TFLOP/s per device"
        assert (row["cluster"], row["model"], row["ep"]) == ("h200-nvl8", "gpt-oss-20b", RANKS)
        assert (row["seed"], row["devices"], row["domain"]) == (3, RANKS, RANKS)
        assert (row["slots"], row["out_of_memory"], row["job"]) == (1, 0, "training")
        assert row["imbalance"] == pytest.approx(np.mean(row["imbalance_by_layer"]))
        assert row["tokens_per_second"] > 0
    assert none["throughput"] < ours["throughput"] < ideal["throughput"]
    assert ours["imbalance"] < 1.03 < none["imbalance"] < none["worst_imbalance"]
    assert (none["copies"], ideal["copies"]) == (0, 0)
    assert 0 < ours["copies"] <= RANKS


def test_rows_are_what_the_library_says():
    options = {"imbalance": 1.7, "noise": 0.3, "steps": 1, "microbatches": 2}
    made = scenario.make_scenario(ScenarioOptions(**WHERE, **options), interval=4)
    expected = run_simulation(made, ["quota", "ideal"])
    given = [f"--{name}={value}" for name, value in options.items()]
    (found,) = rows(*QUICK, *given, "--policy", "quota")
    assert found["throughput"] == expected[0].throughput
    assert found["share_of_ideal"] == expected[0].throughput / expected[1].throughput
    assert found["stages"] == expected[0].stages


def test_recorded_loads_are_simulated(trace):
    found = rows(*TRAINING, "--policy", "none,ultraep", "--trace", trace)
    assert found[0]["imbalance"] > found[1]["imbalance"] >= 1
    assert "recorded loads: 6 microbatches of 1 layer" in invoke(*TRAINING, "--trace", trace).stdout


def test_prefill_is_in_requests():
    found = rows(*QUICK, "--prefill", "stem", "--policy", "none,ultraep,ideal")
    assert {row["unit"] for row in found} == {"requests/s"}
    assert {row["job"] for row in found} == {"prefill"}
    assert "experts back" not in found[0]["stages"]
    assert found[0]["throughput"] < found[1]["throughput"] <= found[2]["throughput"]


def test_files_of_ones_own_are_read(tmp_path):
    cluster = text(tmp_path / "c.toml", CLUSTER.format(memory=200))
    (found,) = rows(*TRAINING, "--cluster", f"{cluster}:mine", "--policy", "ultraep")
    assert (found["cluster"], found["domain"]) == ("mine", 4)
    (whole,) = rows(*TRAINING, "--cluster", cluster, "--domain", 8, "--policy", "ultraep")
    assert whole["domain"] == 8
    assert whole["imbalance"] < found["imbalance"]


# -- what it prints ------------------------------------------------------------------------------


def test_the_report_fits_and_says_what_it_means():
    result = invoke(*TRAINING, width=80)
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    flat = " ".join(result.stdout.split())
    assert "gpt-oss-20b (21B-A4B) on h200-nvl8: 8 devices, EP8 in one fast-link domain" in flat
    assert "drawn loads of imbalance 2 when nothing is balanced" in flat
    ours, ideal = rows(*TRAINING, "--policy", "ultraep,ideal")
    assert (
        f"ultraep would bring {ours['gain_over_none']:.2f}x over no balancing, "
        f"{ours['share_of_ideal']:.0%} of forced balance" in flat
    )
    assert f"{ideal['throughput']:,.1f} 100.0%" in flat
    assert "docs/simulator.md" in flat
    assert "out of memory" not in flat
    assert result.stderr == ""


def test_only_what_was_asked_for_is_shown():
    shown = invoke(*TRAINING, "--policy", "quota").stdout
    assert "quota would bring" in shown
    first = [line.split()[0] for line in shown.splitlines() if line.strip()]
    assert {"quota", "experts"} <= set(first)
    assert not {"none", "ideal", "eplb", "ultraep"} & set(first)


def test_it_says_when_balancing_does_not_pay():
    flat = " ".join(invoke(*TRAINING, "--imbalance", 1, "--noise", 0).stdout.split())
    assert "ultraep would not pay here: 1.00x over no balancing" in flat


def test_devices_that_run_out_of_memory_are_marked(tmp_path):
    memory = rows(*TRAINING, "--policy", "none,ultraep")
    needed = [row["memory_gb"]["total"] for row in memory]
    cluster = text(tmp_path / "c.toml", CLUSTER.format(memory=sum(needed) / 2))
    options = (*TRAINING, "--cluster", cluster, "--domain", 8)
    none, ours = rows(*options, "--policy", "none,ultraep")
    assert none["out_of_memory"] > 0 == ours["out_of_memory"]
    flat = " ".join(invoke(*options).stdout.split())
    assert f"{none['memory_gb']['total']:.1f}!" in flat
    assert "it fits into memory where no balancing does not" in flat


def test_copies_that_stay_need_slots_in_every_layer():
    found = rows(*TRAINING, "--policy", "none,eplb,lplb,ultraep,ideal")
    none, eplb, lplb, ours, ideal = (row["memory_gb"]["slots"] for row in found)
    assert none == ideal == 0 < ours
    assert eplb == lplb == pytest.approx(24 * ours)


def test_a_policy_without_costs_is_priced_as_another_by_name():
    echo, ours = rows(*TRAINING, "--policy", "echo=ultraep,ultraep")
    assert (echo["policy"], echo["priced_as"]) == ("echo", "ultraep")
    assert (ours["policy"], ours["priced_as"]) == ("ultraep", "ultraep")
    assert echo["stages"]["plan"] == ours["stages"]["plan"]
    assert echo["imbalance"] > ours["imbalance"]
    assert "echo=ultraep" in invoke(*TRAINING, "--policy", "echo=ultraep").stdout


def test_presets_are_listed_with_titles_and_sources():
    result = invoke("--presets")
    assert result.exit_code == 0
    flat = " ".join(result.stdout.split())
    for expected in ("gb200-nvl72", "qwen3-235b", "stem", "data sheet", "huggingface.co"):
        assert expected in flat


# -- what it writes ------------------------------------------------------------------------------


def test_a_timeline_is_written_and_stdout_stays_json(tmp_path):
    path = tmp_path / "out.json"
    rows(*TRAINING, "--policy", "none,ultraep", "--timeline", path, "--timeline-layers", 2)
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "none",
        "ultraep",
    }


# -- what it refuses -----------------------------------------------------------------------------


def damaged(path, trace):
    path.write_bytes(trace.read_bytes()[:100])
    return path


def save(path, loads):
    np.save(path, loads)
    return path


BAD_OPTIONS = {
    "cluster": (["--cluster", "gb20"], "unknown cluster 'gb20'; did you mean gb200-nvl72? known"),
    "model": (["--model", "gpt-oss"], "unknown model 'gpt-oss'; did you mean gpt-oss-"),
    "ep": (["--ep", 7], "32 experts of gpt-oss-20b do not divide evenly over 7 ranks"),
    "weights": (["--model", "qwen3-235b"], "per device do not fit into the 141 GB"),
    "policy": (["--policy", "none,magic"], "unknown policy 'magic'; known are none, ultraep"),
    "no_price": (["--policy", "echo"], "policy 'echo' has no costs of its own, only ultraep"),
    "beyond": (["--policy", "llep=ultraep"], "as ultraep: it copies beyond spare slots"),
    "anew": (["--policy", "echo=eplb"], "as eplb: it copies anew in every microbatch"),
    "for_nothing": (["--policy", "echo=none"], "as none: there nothing is copied"),
    "no_policy": (["--policy", ","], "--policy must name at least one"),
    "prefill": (["--prefill", "stem"], "--microbatches and --steps have no meaning there"),
    "noise": (["--noise", "nan"], "noise must be at least 0, got nan"),
    "topics": (["--topic-length", 4, "--drift-length", 4], "exclude each other"),
    "domain": (["--domain", 3], "8 ranks do not divide by a domain of 3"),
    "slots": (["--slots", -1], "slots must lie between 0 and 32, got -1"),
    "tolerance": (["--tolerance", "nan"], "tolerance must lie between 0 and 1000, got nan"),
    "seed": (["--seed", -1], "seed must be at least 0, got -1"),
    "processes": (["--processes", 0], "--processes must be at least 1, got 0"),
    "ending": (["--plot", "out.pdf"], "out.pdf: a picture ends in .png, .svg, .html, got .pdf"),
    "plot": (["--plot", "/none/out.png"], "/none/out.png: cannot be written"),
    "timeline": (["--timeline", "/none/out.json"], "/none/out.json: cannot be written"),
    "layers": (["--timeline-layers", 0], "--timeline-layers must be at least 1"),
}
BAD_TRACES = {
    "missing": (lambda d, _: d / "none.npz", "none.npz: no such file"),
    "damaged": (lambda d, good: damaged(d / "a.npy", good), "truncated or damaged"),
    "format": (lambda d, _: text(d / "a.txt", "1"), "unknown format '.txt'"),
    "experts": (lambda d, _: save(d / "a.npy", np.ones((2, 16), int)), "loads of 16 experts"),
    "empty": (lambda d, _: save(d / "a.npy", np.zeros((2, EXPERTS), int)), "without any row"),
    "negative": (
        lambda d, _: save(d / "a.npy", -np.ones((2, EXPERTS), int)),
        "got -1..-1",
    ),
    "huge": (lambda d, _: save(d / "a.npy", np.full((2, EXPERTS), 2**60)), "loads must lie in"),
}


def assert_one_line(result, expected):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("ultraep: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert expected in result.stderr


@pytest.fixture
def nothing_is_simulated(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a wrong setting was not refused before the work")

    monkeypatch.setattr(simulate, "run_simulation", refuse)


@pytest.mark.usefixtures("nothing_is_simulated")
@pytest.mark.parametrize(("options", "expected"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_a_bad_option_is_one_line_before_any_work(options, expected):
    assert_one_line(invoke(*TRAINING, *options), expected)


@pytest.mark.usefixtures("nothing_is_simulated")
@pytest.mark.parametrize(("make", "expected"), BAD_TRACES.values(), ids=BAD_TRACES)
def test_a_bad_trace_is_one_line(tmp_path, trace, make, expected):
    assert_one_line(invoke(*TRAINING, "--trace", make(tmp_path, trace)), expected)


@pytest.mark.usefixtures("nothing_is_simulated")
def test_a_trace_and_drawn_loads_exclude_each_other(trace):
    for option in ("--imbalance", "--noise", "--topic-length", "--drift-length"):
        result = invoke(*TRAINING, "--trace", trace, option, 2)
        assert_one_line(result, f"--trace brings its own loads: {option} has no meaning")


@pytest.mark.usefixtures("nothing_is_simulated")
def test_prefill_refuses_what_only_training_has():
    options = ["--sequence-length", "--pipeline", "--groups", "--microbatches", "--steps"]
    for given in ([option, 1] for option in options):
        assert_one_line(invoke(*QUICK, "--prefill", "stem", *given), f"{given[0]} has no meaning")
    assert_one_line(invoke(*QUICK, "--prefill", "stem", "--no-recompute"), "--no-recompute has no")


def test_requests_that_cannot_be_served_are_one_line(tmp_path):
    path = text(tmp_path / "r.toml", REQUESTS)
    assert_one_line(invoke(*QUICK, "--prefill", f"{path}:none"), "mean_tokens must be positive")
    assert_one_line(invoke(*QUICK, "--prefill", f"{path}:slow"), "no rate of requests")
    assert_one_line(invoke(*QUICK, "--prefill", "stm"), "unknown set of requests 'stm'; did you")


# -- what ultraep plans for ----------------------------------------------------------------------


def ours(*arguments):
    (row,) = rows(*TRAINING, "--policy", "ultraep", *arguments)
    return row


def test_plans_are_made_by_time_as_the_library_makes_them():
    found = ours()
    assert found["objective"] == ultraep.BalanceConfig().objective == "time"
    assert found == ours("--objective", "time")
    assert "ultraep plans by time" in invoke(*TRAINING).stdout
    assert "ultraep plans for balance" in invoke(*TRAINING, "--objective", "balance").stdout


def test_copies_that_do_not_pay_are_not_made():
    balance = ours("--objective", "balance", "--tokens", 64)
    assert balance["copies"] > 0
    assert ours("--tokens", 64)["copies"] < balance["copies"]
    assert ours("--rates", "row=1,copy=1000000000")["copies"] == 0
    assert ours("--rates", "row=1000000")["copies"] >= ours("--objective", "balance")["copies"]


def test_serving_is_planned_for_balance_unless_asked_otherwise():
    asked = (*QUICK, "--prefill", "stem", "--policy", "ultraep")
    assert rows(*asked)[0]["objective"] == "balance"
    assert rows(*asked, "--objective", "time")[0]["objective"] == "time"
