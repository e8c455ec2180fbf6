"""The demo in real processes: equal losses, balanced loads, traces, and no process left."""

import os
import signal
import sys

import pytest

import ultraep
from demo import runs
from demo.runs import LIMIT, TINY, alive, children, gone, start, tiny_job, wait_for_line
from ultraep.errors import CommunicationError
from ultraep_tools.cli.demo import prepare, run
from ultraep_tools.demo.result import DemoResult, trace_folder

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
pytestmark = pytest.mark.slow


def do(job):
    """Return the result of a job and its events."""
    events = []
    with prepare(job) as output_dir:
        result = run(job, events.append, None, output_dir)
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
    assert balanced.loss_held_out == pytest.approx(none.loss_held_out, rel=1e-4)
    assert done[1].loss_difference == pytest.approx(
        max(abs(a / b - 1) for a, b in zip(balanced.losses, none.losses, strict=True)), rel=1e-3
    )
    assert done[1].loss_difference < 1e-4
    assert none.losses[-1] < none.losses[0]
    assert none.before == pytest.approx(balanced.before, rel=1e-2)
    assert none.after == none.before
    assert 1 <= balanced.imbalance_after < balanced.imbalance_before
    assert balanced.imbalance_after == pytest.approx(balanced.imbalance_bound, abs=0.01)
    assert none.copies_per_layer == none.weights_bytes == none.gradients_bytes == 0
    assert min(balanced.copies_per_layer, balanced.weights_bytes, balanced.gradients_bytes) > 0


def test_result_and_traces_can_be_read(done):
    out, result, _ = done
    assert DemoResult.load(out) == result
    for row in result.policies:
        trace = ultraep.read_trace(trace_folder(out, row.policy))
        assert len(trace) == TINY["steps"] * TINY["layers"]
        assert (trace.header.policy, trace.header.ranks) == (row.policy, 2)


@linux
def test_a_killed_rank_is_named_and_the_others_stop(tmp_path):
    ranks = []

    def kill(_):
        ranks[:] = children(os.getpid())[-2:]
        os.kill(ranks[1], signal.SIGKILL)

    job = tiny_job(tmp_path, steps=5000)
    with (
        prepare(job) as output_dir,
        pytest.raises(CommunicationError, match=r"rank 1 failed.*ended by SIGKILL"),
    ):
        run(job, kill, None, output_dir)
    assert len(ranks) == 2
    assert alive(ranks) == []


def running(tmp_path, *options):
    """Start the command; return it during its training, with its ranks and output."""
    out = tmp_path / "out"
    process = start("-m", "ultraep", "demo", "--quick", "--steps", 999, "--out", out, *options)
    wait_for_line(process, "ultraep  code")
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


@linux
def test_torchrun_provides_the_ranks(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    options = ("--quick", "--steps", 2, "--out", tmp_path, "--no-report")
    process = start(*torchrun, runs.TINY_COMMAND, "demo", *options, GLOO_SOCKET_IFNAME="lo")
    ranks = []
    try:
        wait_for_line(process, "1 training")
        ranks = children(process.pid)
        text, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, errors
    finally:
        assert gone([*ranks, process.pid])
    assert text.count("share of forced balance") == 1  # only rank 0 prints
    result = DemoResult.load(tmp_path)
    assert (result.sizes.ranks, result.steps) == (2, 2)
    assert len(ultraep.read_trace(trace_folder(tmp_path, "ultraep"))) == 2 * result.sizes.layers
