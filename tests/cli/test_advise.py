"""`ultraep advise`: numbers, reports and files."""

import json
from functools import cache

import numpy as np
import pytest
from sim.small import gpt_oss

import ultraep
from ultraep_tools.cli import scenario

from . import commands

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
ADVISED = ["--cluster", "h200-nvl8", "--model", "gpt-oss-20b", "--ep", "8"]
SHORT = ["--steps", "1", "--microbatches", "2"]
PREFILL = ("--prefill",)
TWO_DOMAINS = ("--ep", "16")
OTHERS = ("--policy", "eplb,none,lplb")


@pytest.fixture(scope="module", autouse=True)
def few_layers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenario, "load_model", lambda _: gpt_oss(layers=8))
        yield


@cache
def printed(*options, width=100):
    short = [] if "--prefill" in options else SHORT
    return commands.output("advise", *ADVISED, *short, *options, width=width)


def numbers(*options):
    return json.loads(printed(*options, "--json"))


def test_json_is_consistent():
    advice = numbers("--seed", "3", *OTHERS)
    facts = {"job": "training", "devices": 8, "domain": 8, "objective": "time"}
    assert advice | facts == advice
    assert advice["best"] in advice["configurations"]
    none, *tried = advice["configurations"]
    assert (none["policy"], none["slots"], none["copies"]) == ("none", 0, 0)
    for row in advice["configurations"]:
        assert row["gain_over_none"] == row["throughput"] / none["throughput"]
        assert row["seconds"] == pytest.approx(sum(row["stages"].values()))
        *parts, total = row["memory_gb"].values()
        assert sum(parts) == pytest.approx(total)
        assert row["imbalance"] == pytest.approx(np.mean(row["imbalance_by_layer"]))
        assert row["share_of_ideal"] < 1
    assert [row["policy"] for row in tried[::4]] == ["ultraep", "eplb", "lplb"]


def test_a_cluster_of_the_user(tmp_path):
    cluster = tmp_path / "c.toml"
    cluster.write_text(CLUSTER.format(memory=200))
    domains = numbers("--cluster", f"{cluster}:mine")
    assert (domains["cluster"], domains["domain"]) == ("mine", 4)
    whole = numbers("--cluster", f"{cluster}", "--domain", "8")
    assert whole["domain"] == 8
    imbalance = [next(c for c in n["configurations"] if c["slots"]) for n in (whole, domains)]
    assert imbalance[0]["ep"] == 8 > imbalance[1]["ep"]


def test_devices_that_run_out_of_memory_are_marked(tmp_path):
    none, ours, *_ = (row["memory_gb"]["total"] for row in numbers()["configurations"])
    cluster = tmp_path / "c.toml"
    cluster.write_text(CLUSTER.format(memory=(none + ours) / 2))
    options = ("--cluster", f"{cluster}", "--domain", "8")
    without, with_one, *_ = numbers(*options)["configurations"]
    assert without["out_of_memory"] > 0 == with_one["out_of_memory"]
    words = printed(*options)
    assert f"!{without['memory_gb']['total']:.1f}" in words
    assert "out of memory without balancing" in words


def test_the_report_fits_the_terminal():
    text = printed(*OTHERS, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    words = " ".join(text.split())
    assert "gpt-oss-20b (21B-A4B) on h200-nvl8: 8 devices, EP8 in one fast-link domain" in words
    assert "synthetic loads of imbalance 2 without balancing" in words
    assert "docs/simulator.md" in words
    for policy in ("eplb", "lplb", "none"):  # the best number of slots only
        assert words.count(f"EP8 {policy} ") == 1


def test_the_best_configuration_comes_first():
    advice, text = numbers("--imbalance", "1.8"), printed("--imbalance", "1.8")
    best = advice["best"]
    assert text.startswith(
        f"Best: EP8 with {best['slots']} spare slot, {1e3 * best['seconds']:,.0f} ms per microbatch"
    )
    assert f"without balancing ({best['gain_over_none']:.2f}x)" in " ".join(text.split())


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
    assert f"({balanced[0]['gain_over_none']:.2f}x)" in second
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


@pytest.mark.parametrize("options", [(), PREFILL, TWO_DOMAINS], ids=["time", "balance", "domains"])
def test_the_settings_can_be_pasted_into_a_program(options):
    (line,) = [line for line in printed(*options).splitlines() if line.startswith("Settings")]
    arguments = line.removeprefix("Settings").strip()
    settings = eval(f"dict({arguments})", {"ultraep": ultraep})  # our own output
    advice, config = numbers(*options), settings.get("config", ultraep.BalanceConfig())
    assert settings["slots"] == advice["best"]["slots"]
    assert config.objective == advice["objective"]
