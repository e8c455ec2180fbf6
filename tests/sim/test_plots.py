"""Plots contain all policies and stages and need nothing from the network."""

import re
import sys

import matplotlib.image
import pytest

from ultraep.errors import BackendUnavailable, ConfigError
from ultraep.tools.cli.options import ScenarioOptions
from ultraep.tools.cli.scenario import make_scenario
from ultraep.tools.sim.plots import PARTS, Picture, check_plot, write_plot
from ultraep.tools.sim.run import simulate

POLICIES = ("none", "echo=ultraep", "ultraep", "ideal")


@pytest.fixture(scope="module")
def picture():
    options = ScenarioOptions(
        cluster="h200-nvl8", model="gpt-oss-20b", ep=8, steps=1, microbatches=2
    )
    results = simulate(make_scenario(options, interval=4), POLICIES)
    return Picture("the title", results, results[-1].throughput)


def test_a_png_has_the_size_of_the_figure(picture, tmp_path):
    write_plot(tmp_path / "out.png", picture)
    height, width, _ = matplotlib.image.imread(tmp_path / "out.png").shape
    assert (width, height) == (1950, 780)


def test_an_svg_is_reproducible(picture, tmp_path):
    for name in ("a.svg", "b.svg"):
        write_plot(tmp_path / name, picture)
    content = (tmp_path / "a.svg").read_text()
    assert content == (tmp_path / "b.svg").read_text()
    for text in ("the title", *POLICIES, *picture.shares):
        assert f"<!-- {text}" in content


def test_a_page_works_offline(picture, tmp_path):
    write_plot(tmp_path / "out.HTML", picture)
    content = (tmp_path / "out.HTML").read_text("utf-8")
    assert content.startswith("<!doctype html>")
    assert content.count("<svg") == 1
    assert not re.search(r"<(script|link|img)", content)
    for text in ("<title>the title</title>", *POLICIES):
        assert text in content


def test_every_stage_is_in_one_part(picture):
    names = [name for part in PARTS.values() for name in part]
    assert sorted(names) == sorted(picture.results[0].stages)
    for number, result in enumerate(picture.results):
        drawn = sum(values[number] for values in picture.parts().values())
        assert drawn == pytest.approx(1e3 * result.seconds)


def test_unknown_formats_and_a_missing_package(monkeypatch):
    for name in ("out.pdf", "out", "png"):
        with pytest.raises(ConfigError, match=r"a plot must end in \.png, \.svg, \.html"):
            check_plot(name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendUnavailable, match=r"need matplotlib .*ultraep\[plot\]"):
        check_plot("a.png")
