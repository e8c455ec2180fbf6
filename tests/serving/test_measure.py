"""Percentiles, throughput and gains of turns; the sentence, table, notes, rows and page."""

import json

from ultraep.tools.report.rows import as_json
from ultraep.tools.serving.measure import (
    Turn,
    UnderLoad,
    headline,
    notes,
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
