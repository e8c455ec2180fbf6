"""`ultraep demo`: a tour that runs everywhere and says the same every time."""

import re

import pytest
from typer.testing import CliRunner

from ultraep.cli import app, render


def invoke(*arguments, width=80):
    return CliRunner().invoke(app, ["demo", *arguments], env={"COLUMNS": str(width)})


@pytest.fixture(scope="module")
def tour():
    result = invoke()
    assert result.exit_code == 0
    return result.stdout


def test_the_tour_has_all_its_parts(tour):
    titles = re.findall(r"^\d\. (.+)$", tour, re.MULTILINE)
    assert titles == ["Skewed loads", "A plan", "Fewer copies", "Loads that change", "Next"]
    assert "only the planner runs, no model" in " ".join(tour.split())
    assert "ultraep plan FILE --ranks 64" in tour
    assert max(map(len, tour.splitlines())) <= 80


def rows(tour, *names):
    lines = [line.split() for line in tour.splitlines()]
    return [next(cells for cells in lines if cells[: len(n.split())] == n.split()) for n in names]


def test_the_numbers_tell_the_story(tour):
    none, quota, ultraep = rows(tour, "none 2.996", "quota 2.996", "ultraep 2.996")
    assert float(none[2]) > float(quota[2]) > float(ultraep[2]) == float(ultraep[3]) == 1.0
    exact, one, ten = rows(tour, "0 %", "1 %", "10 %")
    assert int(exact[5]) > int(one[5]) > int(ten[5])
    worst = {
        line.split()[0]: float(line.split()[-1]) for line in tour.splitlines() if "worst" in line
    }
    assert worst["none"] > worst["eplb"] > worst["ultraep"] == 1.0


def without_times(tour):
    """The words of the tour, less the last number of every table row, the planning time."""
    return re.sub(r"%\s+[\d.]+$", "%", tour, flags=re.MULTILINE).replace("─", "").split()


def test_the_tour_is_seeded():
    small = ("--ranks", "4", "--experts", "16", "--slots", "2", "--ratio", "1.8")
    first, again, other = (invoke(*small, *seed).stdout for seed in ([], [], ["--seed", "7"]))
    assert without_times(first) == without_times(again)
    assert without_times(first) != without_times(other)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--ranks", "7"], "256 experts do not divide evenly over 7 ranks"),
        (["--ranks", "0"], "ranks must lie between 1"),
        (["--ratio", "999"], "ratio must lie between"),
        (["--slots", "-1"], "slots must lie between"),
        (["--seed", "-1"], "--seed must not be negative, got -1"),
    ],
)
def test_bad_options_are_one_line(options, expected):
    result = invoke(*options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("ultraep: ")
    assert result.stderr.count("\n") == 1
    assert expected in result.stderr


def test_sparklines_span_their_range():
    assert render.sparkline([1.0, 1.5, 2.0, 9.0], low=1.0, high=2.0) == "▁▅██"
    assert render.sparkline([1.0, 1.0], low=1.0, high=1.0, glyphs=render.ASCII) == "__"
