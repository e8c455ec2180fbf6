"""Schedules of faults, how the ends of ranks are classified, and when resources leak."""

import json
from dataclasses import asdict, replace

import pytest

from ultraep.errors import FileError
from ultraep.tools.soak.outcomes import (
    HANG,
    LEAK,
    NOT_INJECTED,
    STOPPED,
    SURVIVED,
    UNNAMED,
    WRONG,
    RankEnd,
    classify,
    growing,
)
from ultraep.tools.soak.schedule import (
    KINDS,
    PLANES,
    Fault,
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


VALID = asdict(replace(FAULTS[0], plane="messages", ranks=3, rank=1))
FILE = {"version": 1, "seed": 7, "faults": [VALID]}
FIELDS = {"kind": "meteor", "plane": "carpet", "stage": "lunch", "rank": 9, "ranks": 1}
FIELDS |= {"microbatch": 0, "delay": -1.0, "seed": 1.5, "number": "one", "colour": "red"}
DAMAGED = [
    ("{", "faults"),
    ("[]", "faults"),
    (json.dumps(FILE | {"version": 2}), "faults"),
    (json.dumps({"version": 1, "faults": [VALID]}), "faults"),
    (json.dumps(FILE | {"faults": []}), "faults"),
    (json.dumps(FILE | {"faults": [VALID, VALID]}), "faults"),
    *((json.dumps(FILE | {"faults": [VALID | {k: v}]}), k) for k, v in FIELDS.items()),
]


@pytest.mark.parametrize(("content", "message"), DAMAGED)
def test_damaged_files_and_wrong_fields_are_refused(content, message, tmp_path):
    (tmp_path / "faults.json").write_text(content)
    with pytest.raises(FileError, match=message):
        read_schedule(tmp_path / "faults.json")


FAULT = Fault(0, "kill", 1, "dispatch", 2, 0.0, "messages", 3, 5)
STAGE = "stage 'dispatch' of layer 0 (step 2)"
NAMED = f"at {STAGE}: all_to_all: rank 1 (process 7) died; noticed by"
GONE = RankEnd(1, killed=True)


STOPPED_BY = RankEnd(2, "CommunicationError", NAMED, (1,), STAGE)
FINE = [RankEnd(rank) for rank in range(3)]
LEFT = "/dev/shm/ultraep-7-control"
RUNS = [  # kind of the fault, ends, whether it fired, what is left, outcome
    ("kill", [GONE, STOPPED_BY], True, "", STOPPED),
    ("kill", [GONE, STOPPED_BY._replace(ranks=(0, 1))], True, "", STOPPED),
    ("kill", [GONE, STOPPED_BY._replace(place="")], True, "", UNNAMED),
    ("kill", [GONE, STOPPED_BY._replace(ranks=(0,))], True, "", UNNAMED),
    ("kill", [GONE, STOPPED_BY._replace(ranks=())], True, "", UNNAMED),
    ("kill", [GONE, RankEnd(2, "WrongNumber", "loss is off by 1")], True, "", WRONG),
    ("kill", [GONE, RankEnd(2, hung=True)], True, "", HANG),
    ("kill", [GONE, RankEnd(2, "ProcessEnded", "exit code -11")], True, "", UNNAMED),
    ("slow", FINE, True, "", SURVIVED),
    ("slow", FINE, False, "", NOT_INJECTED),
    ("slow", FINE, True, LEFT, LEAK),
    ("slow", [*FINE[:2], STOPPED_BY._replace(ranks=(), place="")], False, "", UNNAMED),
    ("hook", [RankEnd(1, "InjectedError", "on purpose"), STOPPED_BY], True, "", STOPPED),
]


@pytest.mark.parametrize(("kind", "ends", "fired", "left", "expected"), RUNS)
def test_the_worst_end_counts(kind, ends, fired, left, expected):
    fault = replace(FAULT, kind=kind)
    assert classify(fault, ends, fired=fired, left=[left] if left else [])[0] == expected


def samples(**slopes):
    return [
        (float(s), {name: 100 + slope * s + s % 7 for name, slope in slopes.items()})
        for s in range(0, 600, 3)
    ]


def test_a_slope_is_a_leak_and_noise_is_not():
    assert growing(samples(rss=0.0, threads=0.0, handles=0.0)) == {}
    assert set(growing(samples(rss=0.1, threads=0.0, handles=0.05))) == {"rss", "handles"}
    jump = [(s, {"rss": 100.0 + 50 * (s > 30)}) for s, _ in samples(rss=0.0)]
    assert growing(jump) == {}  # a cache that was filled once
