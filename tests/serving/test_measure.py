"""Percentiles, throughput and gains of turns; the sentence, table, notes, rows and page."""

import json

import pytest

from ultraep.tools.report.rows import as_json
from ultraep.tools.serving.measure import (
    Turn,
    UnderLoad,
    agreement,
    experts_per_token,
    gains,
    headline,
    notes,
    page,
    rows_of,
    table,
    under_load,
)


def turn(variant="none", rate=2.0, number=0, waited=(0.5, 1.5, None, 1.0), **more):
    return Turn(
        variant=variant,
        rate=rate,
        number=number,
        waited=list(waited),
        tokens=[10] * len(waited),
        seconds=2.0,
        **({"first": [1] * len(waited), "before": 1.5, "after": 1.25} | more),
    )


TURNS = [
    turn(),
    turn("ultraep", waited=(0.25, 0.5, 0.75, 1.0), after=1.0, first=[1, 1, 2, 1]),
    turn("ultraep", rate=1.0, waited=(0.25,), after=1.0),
    turn(rate=1.0, waited=(0.5,), errors={"status 500": 3}, disturbed=0.5),
]


def test_a_prompt_without_a_first_token_counts_in_every_percentile():
    load = UnderLoad("none", 2.0, (turn(), turn(waited=(0.1, None))))
    assert load.percentile(50) == 1.0
    assert load.percentile(90) is None
    assert (load.unanswered, load.throughput, load.tokens) == (2, 1.0, 40)
    assert load.within(1.0) == 0.5


def test_turns_are_grouped_by_rate_and_variant():
    loads = under_load(TURNS)
    assert [(load.rate, load.variant) for load in loads] == [
        *((1.0, "none"), (1.0, "ultraep"), (2.0, "none"), (2.0, "ultraep"))
    ]
    assert gains(loads) == [1.0, 2.0, 1.0, 2.0]
    assert agreement(TURNS, "ultraep") == pytest.approx(4 / 5)


def test_cpu_time_of_experts_is_per_served_token():
    turns = [turn(experts=0.6), turn("ultraep", waited=(1.0, 1.0), experts=0.2)]
    assert experts_per_token(turns, "none") == pytest.approx(0.6 / 30)
    assert notes(turns)[-1].endswith("busiest rank: none 20.000 ms, ultraep 10.000 ms")
    assert experts_per_token(TURNS, "none") is None


def test_rows_contain_every_known_number():
    rows = json.loads(as_json(rows_of(under_load(TURNS), 1.0, "ultraep bench prefill", "a CPU")))
    values = {
        (row["case"]["policy"], row["case"]["rate"], row["metric"]): row["value"] for row in rows
    }
    assert values["ultraep", 2.0, "first_token_gain"] == 2.0
    assert values["none", 2.0, "within_1_s"] == 0.5
    assert values["none", 2.0, "unanswered"] == 1
    assert ("none", 2.0, "first_token_p99") not in values
    assert {row["command"] for row in rows} == {"ultraep bench prefill"}
    assert set(rows[0]) == {
        *("benchmark", "case", "metric", "value", "unit", "device", "versions", "command", "date")
    }


def test_headline_table_and_notes():
    loads = under_load(TURNS)
    both = "First token after 0.500 s with ultraep, 1.000 s with none (2.00x) at 2 prompts/s"
    assert headline(loads) == both
    assert headline(loads[:1]) == "First token after 0.500 s with none at 1 prompts/s"
    head, rows = table(loads, 1.0)
    assert dict(zip(head, rows[3], strict=True))["sooner"] == "2.00x"
    assert dict(zip(head, rows[2], strict=True))["p99"] == "-"
    assert "none at 1/s: 3 status 500" in notes(TURNS)
    assert "first tokens equal to none: ultraep 80.0%" in notes(TURNS)
    assert "used the core of a rank up to 50% of the time" in notes(TURNS)[-1]


def test_the_page_draws_the_measurements():
    drawn = page(TURNS, 1.0, [("Model", "a model")])
    waits = drawn.numbers["waits"]
    assert waits["rates"] == [1.0, 2.0]
    assert [line["label"] for line in waits["lines"]] == ["none", "ultraep"]
    assert waits["lines"][0]["p50"] == [0.5, 1.0]
    assert waits["lines"][0]["p99"] == [0.5, None]
    assert list(drawn.numbers) == ["waits", "served", "intime", "loads"]
    assert "First token after 0.500 s with ultraep" in drawn.html()
    servers = page([turn(before=None, after=None)], 1.0, [])
    assert list(servers.numbers) == ["waits", "served", "intime"]
