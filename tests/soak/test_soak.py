"""Campaigns on real processes, schedules of faults, and how the ends of ranks are classified."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import simulated_hosts
import torch
from ranks import PATIENCE
from soak.outcomes import (
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
from soak.rank import balancer_options
from soak.schedule import (
    KINDS,
    PLANES,
    Fault,
    draw_fault,
    read_schedule,
    write_schedule,
)
from soak.training import Case, Training, Watch, WrongNumber

from ultraep import Balancer, LocalGroup
from ultraep.errors import FileError


def soak(tmp_path, *options):
    """Run the command; return its exit code, its output and its rows."""
    path = tmp_path / "rows.json"
    words = [sys.executable, "-m", "soak", *options, "--json", str(path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*words, "--logs", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    rows = json.loads(path.read_text()) if path.exists() else []
    return done.returncode, done.stdout + done.stderr, rows


def train(case, watch):
    def work(comm):
        balancer = Balancer._with_settings(comm, **balancer_options(case))
        Training(case, balancer, watch).run()

    LocalGroup(case.ranks).run(work)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", range(4))
def test_the_twin_agrees(seed):
    train(Case.drawn(3, seed), Watch())


class SlightlyOff(Watch):
    def network(self, outputs):
        return outputs * (1 + 1e-9)


@pytest.mark.usefixtures("one_thread")
def test_the_twin_notices_a_wrong_number():
    case = next(case for case in (Case.drawn(2, seed) for seed in range(50)) if case.own_network)
    with pytest.raises(WrongNumber, match="off by"):
        train(case, SlightlyOff())


@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are forked")
def test_a_few_faults(tmp_path):
    options = ("--kinds", "kill,slow,router,planner,digest", "--planes", "messages,in-process")
    code, output, rows = soak(tmp_path, "--faults", "5", *options, "--no-steady", "--jobs", "3")
    assert code == 0, output
    assert [row["kind"] for row in rows] == ["kill", "slow", "router", "planner", "digest"]
    assert rows[0]["outcome"] == "stopped"
    assert f"rank {rows[0]['rank']}" in rows[0]["explanation"]
    assert rows[1]["outcome"] == "survived"


def processes_with(text):
    """Return the processes whose environment contains this text, beside this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended
            if text.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(path.parent.name)
    return found


def wait_for(condition):
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are forked")
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 128 + signal.SIGTERM),
        pytest.param(signal.SIGINT, 128 + signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_all_processes(tmp_path, number, code):
    # Ranks that are stopped for longer than this test takes, beside runs without faults.
    faults = [Fault(n, "stop", 1, "loads", 1, 3600.0, "messages", 2, n) for n in range(8)]
    write_schedule(tmp_path / "faults.json", 0, faults)
    command = [sys.executable, "-m", "soak", "--planes", "messages", "--timeout", "3600"]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path)}
    running = subprocess.Popen(
        [*command, "--schedule", str(tmp_path / "faults.json"), "--jobs", "2"],
        env=os.environ | paths,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(lambda: len(list(tmp_path.glob("ultraep-soak-*/rank1.log"))) == 3)
        os.killpg(running.pid, number)  # as `timeout` does
        assert running.wait(PATIENCE) == code
        wait_for(lambda: not processes_with(str(tmp_path)))
    finally:
        for pid in processes_with(str(tmp_path)):
            os.kill(int(pid), signal.SIGKILL)
        running.wait()
    assert list(tmp_path.glob("ultraep-soak-*")) == []


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are forked")
def test_200_faults(tmp_path):
    options = ("--planes", "messages,hybrid,in-process", "--no-steady", "--jobs", "8")
    code, output, rows = soak(tmp_path, "--seed", "11", "--faults", "200", *options)
    assert code == 0, output
    assert len(rows) == 200


@pytest.mark.slow
@pytest.mark.skipif(bool(simulated_hosts.obstacle()), reason="no simulated hosts here")
def test_lost_messages_between_hosts(tmp_path):
    options = ("--kinds", "lost messages,delayed messages", "--no-steady", "--timeout", "4")
    code, output, rows = soak(tmp_path, "--seed", "3", "--faults", "6", *options)
    assert code == 0, output
    assert {row["outcome"] for row in rows[::2]} == {"stopped"}
    assert {row["outcome"] for row in rows[1::2]} == {"survived"}


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
