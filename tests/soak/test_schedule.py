"""Schedules are drawn from a seed, and a file repeats them; damaged files are refused."""

import json
from dataclasses import asdict, replace

import pytest

from ultraep.errors import FileError
from ultraep.tools.soak.schedule import (
    KINDS,
    PLANES,
    draw_fault,
    read_schedule,
    write_schedule,
)

FAULTS = [draw_fault(7, number, 6.0, list(PLANES), list(KINDS)) for number in range(200)]


def test_faults_are_drawn_by_seed_and_number_and_a_file_repeats_them(tmp_path):
    assert draw_fault(7, 150, 6.0, list(PLANES), list(KINDS)) == FAULTS[150]
    assert draw_fault(8, 150, 6.0, list(PLANES), list(KINDS)) != FAULTS[150]
    assert {fault.kind for fault in FAULTS} == set(KINDS)
    assert all(fault.plane in KINDS[fault.kind].planes for fault in FAULTS)
    assert all(fault.stage in KINDS[fault.kind].stages for fault in FAULTS)
    write_schedule(tmp_path / "faults.json", 7, FAULTS)
    assert read_schedule(tmp_path / "faults.json") == (7, FAULTS)


FAULT = asdict(replace(FAULTS[0], plane="messages", ranks=3, rank=1))
FILE = {"version": 1, "seed": 7, "faults": [FAULT]}
WRONG = {"kind": "meteor", "plane": "carpet", "stage": "lunch", "rank": 9, "ranks": 1}
WRONG |= {"microbatch": 0, "delay": -1.0, "seed": 1.5, "number": "one", "colour": "red"}
DAMAGED = [
    ("{", "faults"),
    ("[]", "faults"),
    (json.dumps(FILE | {"version": 2}), "faults"),
    (json.dumps({"version": 1, "faults": [FAULT]}), "faults"),
    (json.dumps(FILE | {"faults": []}), "faults"),
    (json.dumps(FILE | {"faults": [FAULT, FAULT]}), "faults"),
    *((json.dumps(FILE | {"faults": [FAULT | {k: v}]}), k) for k, v in WRONG.items()),
]


@pytest.mark.parametrize(("content", "message"), DAMAGED)
def test_damaged_files_and_wrong_fields_are_refused(content, message, tmp_path):
    (tmp_path / "faults.json").write_text(content)
    with pytest.raises(FileError, match=message):
        read_schedule(tmp_path / "faults.json")
