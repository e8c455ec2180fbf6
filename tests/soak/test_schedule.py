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


def test_a_fault_depends_on_seed_and_number_alone():
    assert draw_fault(7, 150, 6.0, list(PLANES), list(KINDS)) == FAULTS[150]
    assert draw_fault(8, 150, 6.0, list(PLANES), list(KINDS)) != FAULTS[150]


def test_all_kinds_planes_and_delays_are_drawn():
    assert {fault.kind for fault in FAULTS} == set(KINDS)
    assert {fault.plane for fault in FAULTS} == set(PLANES)
    assert all(fault.plane in KINDS[fault.kind].planes for fault in FAULTS)
    assert all(fault.stage in KINDS[fault.kind].stages for fault in FAULTS)
    stops = [fault.delay for fault in FAULTS if fault.kind == "stop"]
    assert min(stops) < 6 < max(stops)


def test_a_file_repeats_a_schedule(tmp_path):
    write_schedule(tmp_path / "faults.json", 7, FAULTS)
    assert read_schedule(tmp_path / "faults.json") == (7, FAULTS)


DAMAGE = {
    "not JSON": lambda content: "{",
    "a list": lambda content: "[]",
    "another version": lambda content: json.dumps(content | {"version": 2}),
    "no seed": lambda content: json.dumps({k: v for k, v in content.items() if k != "seed"}),
    "no fault": lambda content: json.dumps(content | {"faults": []}),
    "twice": lambda content: json.dumps(content | {"faults": content["faults"] * 2}),
}
WRONG = {
    "kind": "meteor",
    "plane": "carpet",
    "stage": "lunch",
    "rank": 9,
    "ranks": 1,
    "microbatch": 0,
    "delay": -1.0,
    "seed": 1.5,
    "number": "one",
    "colour": "red",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused(damage, tmp_path):
    content = {"version": 1, "seed": 7, "faults": [asdict(FAULTS[0])]}
    path = tmp_path / "faults.json"
    path.write_text(DAMAGE[damage](content))
    with pytest.raises(FileError, match=r"faults\.json"):
        read_schedule(path)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_field_is_refused(name, tmp_path):
    fault = asdict(replace(FAULTS[0], plane="messages", ranks=3, rank=1)) | {name: WRONG[name]}
    path = tmp_path / "faults.json"
    path.write_text(json.dumps({"version": 1, "seed": 7, "faults": [fault]}))
    with pytest.raises(FileError, match=name):
        read_schedule(path)
