"""Flight recorder: what ranks write when they fail, hang or are killed, and how it is explained."""

import os
import signal
import time

import pytest
import torch
from cli.commands import shell
from dense import Example, on_ranks
from ranks import PATIENCE, RankPool, meet, set_timeout

from ultraep import BalancedMoE, Balancer, CommunicationError, LocalGroup, PlanMismatch, read_trace
from ultraep.arrays import digest_of
from ultraep.passes import Passes, PassLog
from ultraep.runtime.flight import PASSES, Flight
from ultraep.trace.flight import VARIABLE
from ultraep_tools.crash import crash_folders, read_crash, read_flight

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = 1.5  # seconds


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "flight"))
    return tmp_path / "flight"


def explained(folder):
    (only,) = crash_folders(folder)
    return read_crash(only)


# -- one rank ------------------------------------------------------------------------------------


def test_the_ring_keeps_the_last_passes(folder):
    log = PassLog(1, Flight("some", 1, 2))
    for step in range(1, PASSES + 11):
        Passes(0, step, log).record.at("loads")
    passes = read_flight(log.flight.write("test")).passes
    assert [each.step for each in passes] == list(range(11, PASSES + 11))
    assert [each.number for each in passes] == [each.step for each in passes]


def test_digests_differ_with_contents_and_sizes():
    values = torch.arange(12).reshape(3, 4).numpy()
    other = values.copy()
    other[2, 3] += 1
    swapped = values[:, [1, 0, 2, 3]]
    assert len({digest_of(v) for v in (values, other, swapped, values[:2], values[:0])}) == 5
    assert digest_of(values) == digest_of(values.copy())
    assert digest_of(values, other) != digest_of(other, values)
    assert all(0 < digest_of(v) < 1 << 63 for v in (values, values[:0]))
    assert digest_of(values[0]) == 7324122470350419550  # of every machine: ranks compare digests


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv(VARIABLE, "off")
    balancer = Balancer("alone", experts=4)
    assert balancer.flight is None
    balancer.close()


# -- ranks of one process ------------------------------------------------------------------------


def run_with_a_failing_network(ranks):
    """Rank 1 raises in stage 6 of the second microbatch."""

    def work(comm):
        balancer = Balancer(comm, experts=4)
        layer = BalancedMoE.swiglu(8, 8, 4, 2, balancer=balancer)
        layer(torch.randn(16, 8)).sum().backward()
        if comm.rank == 1:
            layer.experts.register_forward_pre_hook(fail)
        layer(torch.randn(16, 8))

    with pytest.raises(ValueError, match="in the network"):
        LocalGroup(ranks, timeout=PATIENCE).run(work)


def fail(*_):
    raise ValueError("in the network")


def test_a_network_that_raises(folder):
    run_with_a_failing_network(4)
    crash = explained(folder)
    assert (crash.ranks, crash.missing, crash.culprits) == (4, [], [1])
    text = crash.explain()
    assert "Rank 1 raised\n  ValueError: in the network\n" in text
    assert "Rank 1 stayed in 'experts' of layer 0 (step 1, forward)" in text
    assert "Ranks 0, 2 and 3 waited in 'combine' of layer 0 (step 1, forward)" in text
    assert "Ranks 0, 2 and 3 wait for rank 1." in text
    assert "Loads and plans are equal in the 2 microbatches that ranks share." in text


def test_traces_errors_and_files_number_steps_alike(folder, tmp_path):
    def work(comm):
        balancer = Balancer(comm, experts=4, record=tmp_path / "run")
        layer = BalancedMoE.swiglu(8, 8, 4, 2, balancer=balancer)
        for step in (7, 8):
            balancer.record_step(step)
            for _ in range(2):
                layer(torch.randn(16, 8))
        if comm.rank == 1:
            layer.experts.register_forward_pre_hook(fail)
        with pytest.raises((ValueError, CommunicationError)) as caught:
            layer(torch.randn(16, 8))
        balancer.close()
        return str(caught.value)

    errors = LocalGroup(2, timeout=PATIENCE).run(work)
    trace = read_trace(tmp_path / "run")
    assert list(zip(trace.step, trace.microbatch, strict=True)) == [(7, 0), (7, 1), (8, 0), (8, 1)]
    assert "of layer 0 (step 8, microbatch 2)" in errors[0]
    assert "of layer 0 (step 8, microbatch 2, forward)" in explained(folder).explain()


def test_a_folder_that_cannot_be_written_does_not_hide_the_error(folder, caplog):
    folder.write_text("a file")
    run_with_a_failing_network(2)
    assert "no flight file" in caplog.text


def test_nothing_is_written_in_the_good_case(folder):
    on_ranks(Example([8, 8]))
    assert not folder.exists()


def test_ranks_with_other_plans_are_named(folder):
    def work(comm):
        balancer = Balancer(comm, experts=4, domain=comm.size)
        layer = BalancedMoE.swiglu(8, 8, 4, 2, balancer=balancer)
        skewed = torch.ones(16, 8)
        layer(skewed, policy="none" if comm.rank == 2 else None)

    with pytest.raises(PlanMismatch):
        LocalGroup(4, timeout=PATIENCE).run(work)
    text = explained(folder).explain()
    assert (
        "The plans of layer 0 (step 0, forward) differ between ranks 0, 1 and 3 and rank 2." in text
    )


# -- processes -----------------------------------------------------------------------------------


def misbehave(rank, group, kind, folder, meeting):
    """Rank 1 hangs, dies or stops before the third microbatch; return the errors of the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(folder))
        balancer = Balancer(group, experts=3, timeout=PATIENCE)
        layer = BalancedMoE.swiglu(8, 8, 3, 1, balancer=balancer)
        for _ in range(2):
            layer(torch.randn(16, 8)).sum().backward()
        set_timeout(balancer.comm, SHORT)
        if rank == 1:
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            until = time.monotonic() + PATIENCE
            while not list(folder.glob("*/rank-00001.json")) and time.monotonic() < until:
                time.sleep(0.05)  # a hang: the thread of the recorder writes the file
        else:
            with pytest.raises(CommunicationError):
                layer(torch.randn(16, 8))
        if kind == "hang":
            meet(meeting, rank, 3)
        return repr(balancer.flight.errors)


@pytest.mark.parametrize("kind", ["hang", "kill"])
def test_a_rank_that_hangs_or_dies(kind, tmp_path):
    folder, meeting = tmp_path / "flight", tmp_path / "meeting"
    meeting.mkdir()
    with RankPool() as pool:
        outcomes = pool.outcomes(3, misbehave, kind, folder, meeting)
    assert [o.rank for o in outcomes if o.kind != "result"] == [1] * (kind == "kill"), outcomes
    crash = explained(folder)
    text = crash.explain()
    assert (crash.ranks, crash.culprits) == (3, [1])
    assert "Ranks 0 and 2 waited in 'loads' of layer 0 (step 2, forward)" in text
    assert "Ranks 0 and 2 wait for rank 1." in text
    if kind == "kill":
        assert "Rank 1 left no file: killed, stopped, or" in text
    else:
        assert "Rank 1 had left 'dispatch back' of layer 0 (step 1, backward)" in text
        assert " in misbehave." in text
    assert crash.flights[0].errors[0].startswith("CommunicationError: at the loads of layer 0")
    assert 1 in crash.flights[0].named  # and 2, if it gave up before rank 0 asked


SCRIPT = """
import torch
from ultraep import BalancedMoE, Balancer
balancer = Balancer("alone", experts=4)
BalancedMoE.swiglu(8, 8, 4, 2, balancer=balancer)(torch.randn(4, 8))
raise KeyError("in the loader")
"""


def test_an_exception_outside_of_the_layer(tmp_path):
    environment = {VARIABLE: str(tmp_path), "ULTRAEP_RATES": "off"}
    code, _, errors = shell(program=("-c", SCRIPT), **environment)
    assert code == 1
    assert "KeyError: 'in the loader'" in errors
    text = explained(tmp_path).explain()
    assert "Rank 0 raised\n  KeyError: 'in the loader'\n" in text
    assert "Rank 0 had left 'combine' of layer 0 (step 0, forward)" in text
