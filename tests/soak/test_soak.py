"""Campaigns on real processes, how faults are drawn, and how the ends of ranks are classified."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import PATIENCE
from soak import __main__ as program
from soak.outcomes import (
    HANG,
    LEAK,
    NOT_INJECTED,
    STOPPED,
    SURVIVED,
    UNNAMED,
    WRONG,
    RankEnd,
    Row,
    classify,
    growth,
)
from soak.rank import make_balancer
from soak.schedule import KINDS, Fault, draw_fault, draw_faults
from soak.training import Case, Training, Watch, WrongNumber

from ultraep import LocalGroup

FORKED = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are forked")


def start(folder, *options):
    words = [sys.executable, "-m", "soak", *options]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(folder)}
    return subprocess.Popen(
        words,
        env=os.environ | paths,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def soak(folder, *options):
    """Run the program; return its exit code, its output and its records."""
    running = start(folder, *options, "--json", str(folder / "rows.json"))
    output = running.communicate()[0]
    return running.returncode, output, json.loads((folder / "rows.json").read_text())


def train(case, watch):
    def work(comm):
        balancer = make_balancer(comm, case)
        Training(case, balancer, watch).run()
        return balancer.stats()["weights_bytes_sent"]

    return sum(LocalGroup(case.ranks).run(work))


@pytest.mark.usefixtures("one_thread")
def test_the_twin_agrees():
    bytes_of_replicas = [train(Case(3, seed), Watch()) for seed in range(4)]
    assert any(bytes_of_replicas)


class SlightlyOff(Watch):
    def network(self, outputs):
        return outputs * (1 + 1e-9)


@pytest.mark.usefixtures("one_thread")
def test_the_twin_notices_a_wrong_number():
    case = next(case for case in (Case(2, seed) for seed in range(50)) if case.own_network)
    with pytest.raises(WrongNumber, match="off by"):
        train(case, SlightlyOff())


@FORKED
def test_a_few_faults(tmp_path):
    kinds = {"kill": STOPPED, "router": STOPPED, "slow": SURVIVED}
    options = ["--faults", "4", "--planes", "messages", "in-process", "--kinds", *kinds]
    code, output, rows = soak(tmp_path, *options)
    assert code == 0, output
    assert {row["kind"] for row in rows} == kinds.keys()
    assert all(row["outcome"] == kinds[row["kind"]] for row in rows)
    assert "without faults; largest growth" in output
    assert output.splitlines()[-1].startswith("Passed: 4 faults, ")


def processes_with(text):
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


@FORKED
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_all_processes(tmp_path, number):
    running = start(tmp_path, "--kinds", "stop", "--planes", "messages", "--minutes", "60")
    try:
        wait_for(lambda: len(list(tmp_path.glob("ultraep-soak-*/*/rank1.log"))) >= 3)
        os.killpg(running.pid, number)  # as `timeout` does
        assert running.wait(PATIENCE) == 130
        wait_for(lambda: not processes_with(str(tmp_path)))
    finally:
        for pid in processes_with(str(tmp_path)):
            os.kill(int(pid), signal.SIGKILL)
        running.communicate()
    assert list(tmp_path.glob("ultraep-soak-*")) == []


@FORKED
@pytest.mark.slow
def test_100_faults(tmp_path):
    code, output, rows = soak(tmp_path, "--seed", "11")
    assert code == 0, output
    assert len(rows) == 100


def test_faults_are_drawn_by_seed_and_number():
    faults = [draw_fault(7, number) for number in range(200)]
    assert draw_fault(8, 150) != faults[150]
    assert {fault.kind for fault in faults} == set(KINDS)
    chosen = draw_faults(7, ["kill", "slow"], ["messages"])
    assert next(chosen) == next(
        fault for fault in faults if fault.kind in ("kill", "slow") and fault.plane == "messages"
    )


FAULT = Fault(17, "kill", 1, "dispatch", 2, 0.0, "messages", 3, 5)
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


def test_the_verdict_is_one_line_and_repeats_failures():
    rows = [Row(FAULT, outcome) for outcome in (SURVIVED, STOPPED, NOT_INJECTED)]
    passed, verdict = program.judge(rows, [], seed=7)
    assert passed
    assert verdict == (
        "Passed: 3 faults, 1 survived, 1 stopped with names, 1 not injected, no failure"
    )
    passed, verdict = program.judge([*rows, Row(FAULT, HANG), Row(FAULT, LEAK)], [], seed=7)
    assert not passed
    assert verdict.startswith("FAILED: 1 hang, 1 leak; repeat with: make soak OPTIONS='--seed 7")
    assert not program.judge(rows, ["rss grew"], seed=7)[0]


def test_growth_is_noticed_and_noise_and_warm_up_are_not():
    noisy = [{"rss": 100.0 + s % 7 + 50 * (s > 30), "handles": 9.0} for s in range(200)]
    assert growth(noisy) == {"rss": pytest.approx(0, abs=1), "handles": 0}
    assert growth([{"rss": 100 + 0.3 * s} for s in range(200)])["rss"] > 24
    assert growth(noisy[:9]) == {}
