"""`ultraep advise`: what it prints, what it refuses, and that both forms say the same."""

import json
from functools import cache

import pytest
from typer.testing import CliRunner

import ultraep
import ultraep.tools.cli
from ultraep.tools.cli import advise as advise_command

SMALL = ["--cluster", "h200-nvl8", "--model", "gpt-oss-20b", "--ep", "8"]
SHORT = ["--steps", "1", "--microbatches", "2", "--processes", "1"]
EVEN = ["--imbalance", "1.02", "--noise", "0.01"]
BALANCE = ["--objective", "balance"]


def invoke(*arguments, width=100):
    environment = {"COLUMNS": str(width), "FORCE_COLOR": None, "TERM": "dumb"}
    command = ["advise", *SMALL, *map(str, arguments)]
    return CliRunner().invoke(ultraep.tools.cli.app, command, env=environment)


@cache
def printed(*arguments, width=100):
    result = invoke(*SHORT, *arguments, width=width)
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    return result.stdout


def flat(text):
    return " ".join(text.split())


@cache
def figures(*arguments):
    return json.loads(printed(*arguments, "--json"))


# -- what it prints ------------------------------------------------------------------------------


def test_the_verdict_comes_first_with_its_figures():
    asked = ["--imbalance", "1.8", *BALANCE]
    found, text = figures(*asked), flat(printed(*asked))
    gain, option = found["gain"], found["option"]
    assert text.startswith(
        f"Pays: {option['slots']} spare slot and tolerance {option['tolerance']:g} bring "
        f"{gain['overall']:.2f}x ({gain['low']:.2f}x to {gain['high']:.2f}x)"
    )
    assert f"{option['share']:.1%} of ideal instead of {found['none']['share']:.1%}" in text


def test_all_settings_are_in_the_table_and_the_advice_is_marked():
    found, text = figures(*BALANCE), printed(*BALANCE)
    assert len(found["options"]) == 16
    for option in found["options"]:
        assert f"{option['share']:.1%}" in text
    marked = [line for line in text.splitlines() if "%*" in line]
    assert len(marked) == 1
    assert marked[0].startswith(str(found["slots"]))
    assert f"{found['option']['share']:.1%}*" in marked[0]


@pytest.mark.parametrize("asked", [(), BALANCE], ids=["time", "balance"])
def test_the_settings_can_be_copied(asked):
    (line,) = [own for own in printed(*asked).splitlines() if own.startswith("Settings")]
    arguments = line.removeprefix("Settings").strip()
    given = eval(f"dict({arguments})", {"ultraep": ultraep})  # our own output, as a user pastes it
    found, config = figures(*asked), given.get("config", ultraep.BalanceConfig())
    assert given["slots"] == found["slots"]
    assert (config.tolerance, config.objective) == (found["tolerance"], found["objective"])


def test_plans_by_time_are_the_default_and_need_no_tolerance():
    found, text = figures(), printed()
    assert found["objective"] == ultraep.BalanceConfig().objective == "time"
    assert [option["slots"] for option in found["options"]] == [1, 2, 3, 4]
    assert {option["tolerance"] for option in found["options"]} == {0.0}
    assert "plans by time" in text
    assert "tolerance" not in text


def test_rates_that_are_given_decide():
    dear = figures("--rates", "row=1,copy=1000000000")
    assert dear["option"]["copies"] == 0
    assert dear["verdict"] == "does not pay"
    assert figures()["option"]["copies"] > 0


def test_it_says_plainly_that_it_does_not_pay():
    text = flat(printed(*EVEN, *BALANCE))
    assert text.startswith("Does not pay: 1 spare slot and tolerance 0.05 would bring ")
    assert "Why imbalance without balancing: 1.02" in text
    assert "Break-even more than 16,384 tokens per rank and microbatch" in text
    assert "Settings no spare slots; leave balancing off" in text


# -- JSON ----------------------------------------------------------------------------------------


# -- what it refuses -----------------------------------------------------------------------------

BAD = {  # more of them in test_simulate.py
    "steps": (["--steps", "0"], "steps must be at least 1"),
    "processes": (["--processes", "0"], "--processes must be at least 1, got 0"),
    "steps_of_prefill": (["--prefill", "stem", "--steps", "2"], "--steps has no meaning there"),
}


@pytest.mark.parametrize(("arguments", "expected"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_before_any_work(arguments, expected, monkeypatch):
    def never(*_, **__):
        raise AssertionError("work was done")

    monkeypatch.setattr(advise_command, "ask", never)
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("ultraep: ")
    assert result.stderr.count("\n") == 1
    assert expected in result.stderr
