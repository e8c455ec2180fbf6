"""Plots contain all policies and stages and need nothing from the network."""

import re
import sys

import pytest

from ultraep.errors import BackendUnavailable, ConfigError
from ultraep.tools.cli.scenario import ScenarioOptions, make_scenario
from ultraep.tools.cli.simulate import PARTS, check_plot, write_plot
from ultraep.tools.sim.run import simulate

POLICIES = ("none", "echo=ultraep", "ultraep", "ideal")


@pytest.fixture(scope="module")
def results():
    options = ScenarioOptions(
        cluster="h200-nvl8", model="gpt-oss-20b", ep=8, steps=1, microbatches=2
    )
    return simulate(make_scenario(options, interval=4), POLICIES)


def test_plots_hold_all_policies_and_load_nothing(results, tmp_path):
    shares = [f"{result.throughput / results[-1].throughput:.0%}" for result in results]
    for name in ("a.svg", "b.svg", "out.HTML"):
        write_plot(tmp_path / name, "the title", results, ideal=results[-1].throughput)
        content = (tmp_path / name).read_text("utf-8")
        for text in ("the title", *POLICIES, *PARTS, *shares):
            assert f"<!-- {text}" in content
        assert not re.search(r"<(script|link|img)", content)
    assert content.startswith("<!doctype html>")
    assert content.count("<svg") == 1
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()


def test_unknown_formats_and_a_missing_package(monkeypatch):
    for name in ("out.pdf", "out", "png"):
        with pytest.raises(ConfigError, match=r"a plot must end in \.png, \.svg, \.html"):
            check_plot(name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendUnavailable, match=r"need matplotlib .*ultraep\[plot\]"):
        check_plot("a.png")
