"""Campaigns on real processes. Short ones here; 200 faults are slow, five minutes are long."""

import json
import os
import subprocess
import sys

import pytest
import torch
from quick_interpreter import install

from ultraep import Balancer, LocalGroup
from ultraep.tools.launch import simulated_hosts
from ultraep.tools.soak.rank import balancer_options
from ultraep.tools.soak.training import Case, Training, Watch, WrongNumber

QUICK = f"{install.__module__}:{install.__name__}"


def soak(tmp_path, *options):
    """Run the command; return its exit code, its output and its rows."""
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "ultraep", "soak", *options, "--json", str(path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*command, "--logs", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    rows = json.loads(path.read_text()) if path.exists() else []
    return done.returncode, done.stdout + done.stderr, rows


def train(case, watch):
    def work(comm):
        balancer = Balancer(communicator=comm, **balancer_options(case))
        Training(case, balancer, watch).run()

    LocalGroup(case.ranks).run(work)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", range(4))
def test_the_twin_agrees(seed):
    train(Case(3, seed), Watch())


class SlightlyOff(Watch):
    def network(self, outputs):
        return outputs * (1 + 1e-9)


@pytest.mark.usefixtures("one_thread")
def test_the_twin_notices_a_wrong_number():
    case = next(case for case in (Case(2, seed) for seed in range(50)) if case.own_network)
    with pytest.raises(WrongNumber, match="off by"):
        train(case, SlightlyOff())


@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are forked")
def test_a_few_faults(tmp_path):
    options = ("--kinds", "kill,slow,router,planner,digest", "--planes", "shared,in-process")
    code, output, rows = soak(tmp_path, "--faults", "5", *options, "--no-steady", "--jobs", "3")
    assert code == 0, output
    assert [row["kind"] for row in rows] == ["kill", "slow", "router", "planner", "digest"]
    assert rows[0]["outcome"] == "stopped"
    assert f"rank {rows[0]['rank']}" in rows[0]["explanation"]
    assert rows[1]["outcome"] == "survived"


def test_wrong_options_are_refused(tmp_path):
    for options, message in (
        (["--faults", "0"], "--faults must be at least 1"),
        (["--planes", "carpet"], "--planes must be among"),
        (["--kinds", "meteor"], "--kinds must be among"),
        (["--device", "tpu"], "--device must be cpu or cuda"),
        (["--timeout", "0.1"], "--timeout must lie in"),
        (["--minutes", "1", "--only", "3"], "remove --only"),
        (["--only", "700"], "no fault has a number"),
    ):
        code, output, _ = soak(tmp_path, *options)
        assert code == 2, output
        assert message in output


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are forked")
def test_200_faults(tmp_path):
    options = ("--planes", "shared,sockets,hybrid,in-process", "--no-steady", "--jobs", "8")
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


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are forked")
def test_five_minutes(tmp_path):
    code, output, rows = soak(tmp_path, "--seed", "12", "--minutes", "5", "--preload", QUICK)
    assert code == 0, output
    assert len(rows) > 50
    assert "Runs without faults" in output
