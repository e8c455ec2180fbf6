"""`ultraep simulate` and `ultraep advise`: numbers, reports and files."""

import json
from functools import cache

import numpy as np
import pytest
from sim.small import gpt_oss

import ultraep
from ultraep import BalanceConfig
from ultraep_tools.cli import scenario

from . import commands
from .commands import assert_one_line

EXPERTS, RANKS = 32, 8
WHERE = {"cluster": "h200-nvl8", "model": "gpt-oss-20b", "ep": RANKS}
SMALL = (*(word for name in WHERE for word in (f"--{name}", WHERE[name])), "--processes", 1)
QUICK = (*SMALL, "--interval", 8)
TRAINING = (*QUICK, "--steps", 1, "--microbatches", 3)
CLUSTER = """
[mine]
title = "a small cluster"
source = "a test"
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
title = "long prompts, a tiny limit"
mean_tokens = 50000
spread = 0.1
limit_s = 0.00001
"""


def rows(*options):
    return commands.records("simulate", *options)


def flat(*options, width=100):
    return commands.flat("simulate", *options, width=width)


def text(path, content):
    path.write_text(content)
    return path


def test_json_has_a_consistent_row_for_every_policy():
    policies = rows(*TRAINING, "--policy", "ultraep,none,ideal", "--seed", 3)
    assert [row["policy"] for row in policies] == ["ultraep", "none", "ideal"]
    ours, none, ideal = policies
    settings = WHERE | {
        "seed": 3,
        "devices": RANKS,
        "domain": RANKS,
        "slots": 1,
        "out_of_memory": 0,
    }
    settings |= {"job": "training", "unit": "TFLOP/s per device"}
    for row in policies:
        assert row | settings == row
        assert row["share_of_ideal"] == row["throughput"] / ideal["throughput"]
        assert row["gain_over_none"] == row["throughput"] / none["throughput"]
        assert row["seconds"] == pytest.approx(sum(row["stages"].values()))
        *parts, total = row["memory_gb"].values()
        assert sum(parts) == pytest.approx(total)
        assert row["imbalance"] == pytest.approx(np.mean(row["imbalance_by_layer"]))
    assert none["throughput"] < ours["throughput"] < ideal["throughput"]
    assert ours["imbalance"] < 1.03 < none["imbalance"] < none["worst_imbalance"]
    assert none["copies"] == ideal["copies"] == 0 < ours["copies"] <= RANKS


def test_a_cluster_of_the_user(tmp_path):
    cluster = text(tmp_path / "c.toml", CLUSTER.format(memory=200))
    (domains,) = rows(*TRAINING, "--cluster", f"{cluster}:mine", "--policy", "ultraep")
    assert (domains["cluster"], domains["domain"]) == ("mine", 4)
    (whole,) = rows(*TRAINING, "--cluster", cluster, "--domain", 8, "--policy", "ultraep")
    assert whole["domain"] == 8
    assert whole["imbalance"] < domains["imbalance"]


def ours(*options):
    (row,) = rows(*TRAINING, "--policy", "ultraep", *options)
    return row


def test_the_objective_decides_which_replicas_are_made():
    assert ours()["objective"] == BalanceConfig().objective == "time"
    assert "ultraep plans by time" in flat(*TRAINING)
    assert "ultraep plans for balance" in flat(*TRAINING, "--objective", "balance")
    balance = ours("--objective", "balance", "--tokens", 64)
    assert 0 < balance["copies"] > ours("--tokens", 64)["copies"]


def test_the_report_fits_the_terminal_and_begins_with_a_verdict():
    result = commands.invoke("simulate", *TRAINING, width=80)
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= 80
    words = " ".join(result.stdout.split())
    assert "gpt-oss-20b (21B-A4B) on h200-nvl8: 8 devices, EP8 in one fast-link domain" in words
    assert "synthetic loads of imbalance 2 without balancing" in words
    ours, ideal = rows(*TRAINING, "--policy", "ultraep,ideal")
    assert words.startswith(
        f"ultraep reaches {ours['gain_over_none']:.2f}x the throughput of no balancing, "
        f"{ours['share_of_ideal']:.0%} of forced balance"
    )
    assert f"{ideal['throughput']:,.1f} 100.0%" in words
    assert "docs/simulator.md" in words
    assert "out of memory" not in words


def test_devices_that_run_out_of_memory_are_marked(tmp_path):
    memory = rows(*TRAINING, "--policy", "none,ultraep")
    needed = [row["memory_gb"]["total"] for row in memory]
    cluster = text(tmp_path / "c.toml", CLUSTER.format(memory=sum(needed) / 2))
    options = (*TRAINING, "--cluster", cluster, "--domain", 8)
    none, ours = rows(*options, "--policy", "none,ultraep")
    assert none["out_of_memory"] > 0 == ours["out_of_memory"]
    words = flat(*options)
    assert f"!{none['memory_gb']['total']:.1f}" in words
    assert "it fits into memory, unlike no balancing" in words


def test_requests_that_cannot_be_served_in_time(tmp_path):
    path = text(tmp_path / "r.toml", REQUESTS)
    assert_one_line(commands.invoke("simulate", *QUICK, "--prefill", path), "no request rate")


ADVISED = ["--cluster", "h200-nvl8", "--model", "gpt-oss-20b", "--ep", "8"]
SHORT = ["--steps", "1", "--microbatches", "2", "--processes", "1"]
BALANCE = ("--objective", "balance")
TWO_DOMAINS = ("--ep", "16")


@pytest.fixture(scope="module", autouse=True)
def few_layers():
    """Simulate eight layers of the model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenario, "load_model", lambda _: gpt_oss(layers=8))
        yield


@cache
def printed(*options):
    return commands.output("advise", *ADVISED, *SHORT, *options)


def numbers(*options):
    return json.loads(printed(*options, "--json"))


def test_the_best_configuration_comes_first():
    advice, text = numbers("--imbalance", "1.8"), printed("--imbalance", "1.8")
    best = advice["best"]
    assert text.startswith(
        f"Best: EP8 with {best['slots']} spare slot, {1e3 * best['seconds']:,.0f} ms per microbatch"
    )
    assert f"without balancing ({best['gain_over_none']:.2f}x; " in " ".join(text.split())


def test_a_better_size_of_the_group_comes_before_the_requested_one():
    advice = numbers(*TWO_DOMAINS)
    unbalanced, *balanced = (c for c in advice["configurations"] if c["ep"] == 16)
    assert advice["best"]["ep"] == 8
    assert advice["best"]["tokens_per_second"] > balanced[0]["tokens_per_second"]
    text = " ".join(printed(*TWO_DOMAINS).split())
    first, second = text.split(". ")[:2]
    assert first.startswith("Best: EP8 with 1 spare slot, ")
    assert second.startswith(f"Your EP16: {1e3 * balanced[0]['seconds']:,.0f} ms with 1 spare slot")
    assert f"{1e3 * unbalanced['seconds']:,.0f} ms without balancing" in second
    assert f"({balanced[0]['gain_over_none']:.2f}x; " in second
    assert "replicas stay in domains" not in text


def test_balancing_that_does_not_pay_is_said_so():
    words = " ".join(printed("--imbalance", "1.02").split())
    assert words.startswith("Best: EP8 without balancing, ")
    assert ": balancing does not pay." in words
    assert "Settings no spare slots; leave balancing off" in words


def test_all_settings_are_in_the_table_and_the_best_is_marked():
    advice, text = numbers(), printed()
    assert [c["slots"] for c in advice["configurations"]] == [0, 1, 2, 3, 4]
    for setting in advice["configurations"]:
        assert f"{setting['share_of_ideal']:.1%}" in text
    (marked,) = [line for line in text.splitlines() if line.startswith("*EP8")]
    assert marked.split()[2] == str(advice["best"]["slots"])


@pytest.mark.parametrize("options", [(), BALANCE, TWO_DOMAINS], ids=["time", "balance", "domains"])
def test_the_settings_can_be_pasted_into_a_program(options):
    (line,) = [line for line in printed(*options).splitlines() if line.startswith("Settings")]
    arguments = line.removeprefix("Settings").strip()
    settings = eval(f"dict({arguments})", {"ultraep": ultraep})  # our own output
    advice, config = numbers(*options), settings.get("config", ultraep.BalanceConfig())
    assert settings["slots"] == advice["best"]["slots"]
    assert config.objective == advice["objective"]
