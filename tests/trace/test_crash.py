"""Flight files: reading them, joining ranks, and files that are damaged, missing or foreign."""

import json
import os
import random
import time
from dataclasses import replace

import pytest
from damage import damaged

from ultraep import FileError
from ultraep.trace.flight import FlightFile, Pass
from ultraep_tools.crash import crash_folders, read_crash, read_flight


def passed(number, *, stage="combine", **changes):
    kind = {"combine": "forward", "dispatch back": "backward"}.get(stage, "forward")
    values = Pass(number, 0, number, kind, stage, False, 9.0, 8.0 - number, 11, 12)
    return values._replace(**changes)


def flight(rank, passes=(), *, ranks=3, **changes):
    values = FlightFile(
        *("ab12", rank, ranks, rank, "host", 100 + rank, "error", 1e9), *((), "", tuple(passes))
    )
    return replace(values, **changes)


def write(folder, *flights):
    folder.mkdir(exist_ok=True)
    for each in flights:
        (folder / f"rank-{each.rank:05d}.json").write_text(each.as_json())
    return folder


def test_ranks_that_wait_for_one_that_is_behind(tmp_path):
    waiting = passed(3, stage="dispatch", open=True)
    text = '  File "/train.py", line 7 in load\n  File "/train.py", line 9 in <module>\n'
    behind = flight(2, [passed(1), passed(2)], stack=text)
    ahead = [flight(rank, [passed(1), passed(2), waiting]) for rank in (0, 1)]
    crash = read_crash(write(tmp_path, *ahead, behind))
    assert (crash.culprits, crash.missing, crash.behind) == ([2], [], [2])
    waited, left = (time.strftime("%H:%M:%S", time.localtime(1e9 - since)) for since in (5, 6))
    assert crash.explain().splitlines() == [
        "Ranks 0 and 1 wait for rank 2.",
        "Ranks 0 and 1 waited in 'dispatch' of layer 0 (step 3, forward) for 5.0 s, "
        f"since {waited}.",
        "Rank 2 had left 'combine' of layer 0 (step 2, forward) 6.0 s before, "
        f"at {left}, with the main thread at /train.py:7 in load.",
        "Loads and plans are equal in the 3 microbatches that ranks share.",
    ]
    day = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1e9))
    assert crash.heading() == f"{tmp_path}: files of 3 of 3 ranks, {day}"


def test_ranks_that_a_launcher_ended_are_not_blamed(tmp_path):
    error = "CommunicationError: at the loads: rank 1 (process 7) died; noticed by rank 2 of 3"
    waiting = passed(2, stage="loads", open=True)
    own = flight(2, [passed(1), waiting], errors=(error,), named=(1,))
    crash = read_crash(write(tmp_path, own))
    assert (crash.missing, crash.culprits) == ([0, 1], [1])
    assert "Rank 2 waits for rank 1." in crash.explain()


def test_files_without_named_ranks_and_a_rank_without_microbatches(tmp_path):
    own = flight(2, [passed(1)], errors=("CommunicationError: rank 1 (process 7) died",))
    record = json.loads(own.as_json())
    del record["named"]  # as earlier versions wrote them
    (tmp_path / "rank-00002.json").write_text(json.dumps(record))
    assert read_crash(tmp_path).culprits == [0, 1]
    assert read_flight(tmp_path / "rank-00002.json") == own
    write(tmp_path, flight(0))
    assert "Rank 0 had not begun a microbatch." in read_crash(tmp_path).explain()


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 0, 1)])
def test_a_rank_that_waits_for_a_stopped_one_is_not_blamed(tmp_path, order):
    """Rank 1 was stopped and has gone on; rank 0 waited for it, and rank 2 for both."""
    passes = [passed(1, stage="dispatch", open=True), passed(1, stage="loads", open=True)]
    named = {0: (1,), 1: (0, 1), 2: (0, 1)}
    flights = [
        flight(rank, [passes[rank != 2]], named=ranks, written=1e9 + order.index(rank))
        for rank, ranks in named.items()
    ]
    crash = read_crash(write(tmp_path, *flights))
    assert (crash.behind, crash.culprits) == ([0, 1], [1])


@pytest.mark.parametrize("stages", [("loads", "loads", "dispatch"), ("loads", "loads", "loads")])
def test_the_last_rank_to_arrive_is_blamed(tmp_path, stages):
    """Rank 1 was stopped before a stage in which the others wait, and writes its file first."""
    flights = [
        flight(rank, [passed(1, stage=stage, open=True, since=0.1 if rank == 1 else 7.0)])
        for rank, stage in enumerate(stages)
    ]
    named = [(1,), (0,), (0, 1)]
    flights = [replace(own, named=named[own.rank], written=1e9 - own.rank % 2) for own in flights]
    assert read_crash(write(tmp_path, *flights)).culprits == [1]


def test_ranks_that_all_wait(tmp_path):
    waiting = passed(2, stage="replicate", open=True)
    crash = read_crash(write(tmp_path, *(flight(rank, [waiting]) for rank in range(3))))
    assert crash.culprits == []
    assert "No rank is behind: a message between them did not arrive." in crash.explain()


def test_different_digests(tmp_path):
    flights = flight(0, [passed(1)]), flight(1, [passed(1, loads=99)])
    text = read_crash(write(tmp_path, *flights)).explain()
    assert "The loads of layer 0 (step 1, forward) differ between rank 0 and rank 1." in text


def test_damaged_and_foreign_files(tmp_path):
    write(tmp_path, flight(0, [passed(1)]), flight(2, balancer="cd34", written=0.0))
    (tmp_path / "rank-00001.json").write_text("{")
    (tmp_path / "rank-00077.json").write_text("[]")
    (tmp_path / "notes.txt").write_text("mine")
    crash = read_crash(tmp_path)
    assert (list(crash.flights), list(crash.damaged), crash.missing) == ([0], [1, 2], [])
    text = crash.explain()
    assert "The file of rank 1 cannot be used: cannot be read as a flight file" in text
    assert "The file of rank 2 cannot be used: it belongs to balancer cd34." in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "not a flight file"),
        ({"version": 2}, "version 2 of flight files, this program reads 1"),
        ({"rank": 3}, "rank 3 of 3"),
        ({"passes": [[1]]}, "missing"),
        ({"passes": 3}, "not iterable"),
        ({"written": float("nan")}, "a time out of range"),
        ({"named": [3]}, r"rank 0 of 3, named \(3,\)"),
    ],
)
def test_invalid_files(tmp_path, changes, message):
    path = tmp_path / "rank-00000.json"
    path.write_text(json.dumps(json.loads(flight(0, [passed(1)]).as_json()) | changes))
    with pytest.raises(FileError, match=message) as caught:
        read_flight(path)
    assert "\n" not in str(caught.value)


def test_random_damage_never_raises_anything_else(tmp_path):
    content = flight(0, [passed(n) for n in range(1, 9)], errors=("ValueError: x",)).as_json()
    write(tmp_path, flight(1, [passed(1)]))
    rng = random.Random(0)
    for _ in range(300):
        (tmp_path / "rank-00000.json").write_bytes(damaged(content.encode(), rng))
        assert read_crash(tmp_path).explain()


def test_folders(tmp_path):
    with pytest.raises(FileError, match="not a folder"):
        crash_folders(tmp_path / "nothing")
    assert crash_folders(tmp_path) == []
    older = write(tmp_path / "a", flight(0))
    newer = write(tmp_path / "b", flight(0))
    os.utime(older / "rank-00000.json", (1, 1))
    assert crash_folders(tmp_path) == [newer, older]
    (newer / "rank-00000.json").write_text("")
    with pytest.raises(FileError, match="no flight file that can be read"):
        read_crash(newer)
