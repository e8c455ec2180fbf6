"""`ultraep advise`: the verdict, the settings, and that text and JSON agree."""

import json
from functools import cache

import pytest
from sim.small import gpt_oss

import ultraep
from ultraep.tools.cli import scenario

from . import commands

SMALL = ["--cluster", "h200-nvl8", "--model", "gpt-oss-20b", "--ep", "8"]
SHORT = ["--steps", "1", "--microbatches", "2", "--processes", "1"]
BALANCE = ["--objective", "balance"]


@pytest.fixture(scope="module", autouse=True)
def few_layers():
    """Simulate eight layers of the model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenario, "load_model", lambda _: gpt_oss(layers=8))
        yield


@cache
def printed(*options):
    return commands.output("advise", *SMALL, *SHORT, *options)


def numbers(*options):
    return json.loads(printed(*options, "--json"))


def test_the_verdict_comes_first_with_its_numbers():
    options = ["--imbalance", "1.8", *BALANCE]
    advice, text = numbers(*options), " ".join(printed(*options).split())
    gain, option = advice["gain"], advice["option"]
    assert text.startswith(
        f"Pays: {option['slots']} spare slot and tolerance {option['tolerance']:g} reach "
        f"{gain['overall']:.2f}x ({gain['low']:.2f}x to {gain['high']:.2f}x)"
    )
    assert f"{option['share']:.1%} of forced balance instead of" in text
    assert f"{advice['none']['share']:.1%}" in text


def test_all_settings_are_in_the_table_and_the_advice_is_marked():
    advice, text = numbers(*BALANCE), printed(*BALANCE)
    assert len(advice["options"]) == 16
    for option in advice["options"]:
        assert f"{option['share']:.1%}" in text
    marked = [line for line in text.splitlines() if " *" in line and "%" in line]
    assert len(marked) == 1
    assert marked[0].startswith(str(advice["slots"]))
    assert f"*{advice['option']['share']:.1%}" in marked[0]


@pytest.mark.parametrize("options", [(), BALANCE], ids=["time", "balance"])
def test_the_settings_can_be_pasted_into_a_program(options):
    (line,) = [line for line in printed(*options).splitlines() if line.startswith("Settings")]
    arguments = line.removeprefix("Settings").strip()
    settings = eval(f"dict({arguments})", {"ultraep": ultraep})  # our own output
    advice, config = numbers(*options), settings.get("config", ultraep.BalanceConfig())
    assert settings["slots"] == advice["slots"]
    assert (config.tolerance, config.objective) == (advice["tolerance"], advice["objective"])
