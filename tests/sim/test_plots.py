"""Pictures: all policies and stages are in them, and they need nothing from outside."""

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
    asked = ScenarioOptions(cluster="h200-nvl8", model="gpt-oss-20b", ep=8, steps=1, microbatches=2)
    results = simulate(make_scenario(asked, interval=4), POLICIES)
    return Picture("a title of ours", results, results[-1].throughput)


def test_a_png_can_be_read_again(picture, tmp_path):
    write_plot(tmp_path / "out.png", picture)
    height, width, _ = matplotlib.image.imread(tmp_path / "out.png").shape
    assert (width, height) == (1950, 780)


def test_an_svg_is_the_same_every_time(picture, tmp_path):
    for name in ("a.svg", "b.svg"):
        write_plot(tmp_path / name, picture)
    content = (tmp_path / "a.svg").read_text()
    assert content == (tmp_path / "b.svg").read_text()
    for words in ("a title of ours", *POLICIES, *picture.shares):
        assert f"<!-- {words}" in content


def test_a_page_works_offline(picture, tmp_path):
    write_plot(tmp_path / "out.HTML", picture)
    content = (tmp_path / "out.HTML").read_text("utf-8")
    assert content.startswith("<!doctype html>")
    assert content.count("<svg") == 1
    assert not re.search(r"<(script|link|img)", content)
    for words in ("<title>a title of ours</title>", *POLICIES):
        assert words in content


def test_parts_hold_every_stage_once(picture):
    result = picture.results[0]
    named = [name for names in PARTS.values() for name in names]
    assert sorted(named) == sorted(result.stages)
    for number, result in enumerate(picture.results):
        drawn = sum(values[number] for values in picture.parts().values())
        assert drawn == pytest.approx(1e3 * result.seconds)


@pytest.mark.parametrize("name", ["out.pdf", "out", "png"])
def test_other_endings_are_refused(name):
    with pytest.raises(ConfigError, match=r"a picture ends in \.png, \.svg, \.html"):
        check_plot(name)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendUnavailable, match=r"need matplotlib .*ultraep\[plot\]"):
        check_plot("a.png")
