"""The demo in real processes: equal losses, balanced loads, traces, and no process left."""

import os
import signal
import sys

import numpy as np
import pytest

import ultraep
from demo.runs import LIMIT, TINY, alive, children, gone, start, tiny_job, wait_for_line
from ultraep.errors import CommunicationError
from ultraep_tools.cli.demo import prepare, run
from ultraep_tools.demo.result import DemoResult, trace_folder

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
pytestmark = pytest.mark.slow


def do(job):
    events = []
    prepare(job)
    result = run(job, events.append)
    result.save(job.out)
    return result, events


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    result, events = do(tiny_job(out))
    return out, result, events


def test_losses_agree_and_loads_are_balanced(done):
    none, balanced = done[1].policies
    assert (none.policy, balanced.policy) == ("none", "ultraep")
    assert len(none.losses) == len(none.before) == len(done[1].domains) == TINY["steps"]
    assert balanced.losses == pytest.approx(none.losses, rel=1e-4)
    assert done[1].loss_difference == pytest.approx(
        max(abs(a / b - 1) for a, b in zip(balanced.losses, none.losses, strict=True)), rel=1e-3
    )
    assert done[1].loss_difference < 1e-4
    assert none.losses[-1] < none.losses[0]
    assert none.before == pytest.approx(balanced.before, rel=1e-2)
    assert none.after == none.before
    assert 1 <= balanced.imbalance_after < balanced.imbalance_before
    assert none.replicas_per_layer == none.bytes_sent == 0
    assert min(balanced.replicas_per_layer, balanced.bytes_sent) > 0


def test_result_and_traces_can_be_read(done):
    out, result, _ = done
    assert DemoResult.load(out) == result
    for row in result.policies:
        trace = ultraep.read_trace(trace_folder(out, row.policy))
        assert len(trace) == TINY["steps"] * TINY["layers"]
        assert (trace.header.policy, trace.header.ranks) == (row.policy, 2)
        assert np.mean(trace.imbalance_after) == pytest.approx(row.imbalance_after, abs=1e-6)
        if row.policy == "ultraep":
            bounds = [trace.plan(number).lower_bound for number in range(len(trace))]
            assert row.imbalance_after == pytest.approx(np.mean(bounds), abs=0.01)


@linux
def test_a_killed_rank_is_named_and_the_others_stop(tmp_path):
    ranks = []

    def kill(_):
        ranks[:] = children(os.getpid())[-2:]
        os.kill(ranks[1], signal.SIGKILL)

    job = tiny_job(tmp_path, steps=5000)
    prepare(job)
    with pytest.raises(CommunicationError, match=r"rank 1 failed.*ended by SIGKILL"):
        run(job, kill)
    assert len(ranks) == 2
    assert alive(ranks) == []


def running(tmp_path, *options):
    """Start the command; return it during its training, with its ranks and output."""
    out = tmp_path / "out"
    process = start("-m", "ultraep", "demo", "--quick", "--steps", 999, "--out", out, *options)
    wait_for_line(process, "training, ultraep")
    ranks = children(process.pid)
    assert len(alive(ranks)) == 2
    return process, ranks, out


@linux
def test_an_interrupted_run_leaves_traces_and_no_process(tmp_path):
    process, ranks, out = running(tmp_path)
    try:
        os.kill(process.pid, signal.SIGINT)
        text, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 130
        assert "interrupted" in text
        assert "Traceback" not in errors
    finally:
        assert gone([*ranks, process.pid])
    for policy in ("none", "ultraep"):
        assert len(ultraep.read_trace(out / policy / "trace")) >= 4
