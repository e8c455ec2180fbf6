"""Ranks that raise, die, are late or wait elsewhere: every error names them, before the timeout."""

import os
import pickle
import re
import signal
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import (
    PATIENCE,
    TIMED_OUT,
    TRANSPORTS,
    everywhere,
    meet,
    on_communicator,
    set_timeout,
    shared_pool,
)

from ultraep import Balancer
from ultraep.comm import Message
from ultraep.errors import CommunicationError, UltraEPError
from ultraep.runtime import roll_call
from ultraep.runtime.connect import connect

SHORT = 1.5  # seconds
# On a busy machine, other ranks may be too slow to answer as well.
NO_RESPONSE = r"no response from (rank 1|ranks .*\b1\b.*) \(died, stopped, left or not there yet\)"


def complaint(act, *args):
    return named_by(act, *args)[0]


def named_by(act, *args):
    with pytest.raises(CommunicationError) as caught:
        act(*args)
    return str(caught.value), list(caught.value.ranks)


def raise_in_the_middle(comm, log, folder):
    for _ in range(3):
        comm.all_gather(torch.zeros(3))
    meet(folder, comm.rank, comm.size)
    if comm.rank == 1:
        raise ValueError("on purpose")
    log.append(complaint(comm.all_gather, torch.zeros(3)))
    return log


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_raises_stops_the_others(transport, tmp_path):
    log = []
    if transport == "local":
        with pytest.raises(ValueError, match="on purpose"):
            everywhere(transport, 3, raise_in_the_middle, log, tmp_path)
    else:
        args = (raise_in_the_middle, (log, tmp_path), PATIENCE)
        actual = {o.rank: o for o in shared_pool().outcomes(3, on_communicator, *args)}
        assert "on purpose" in actual[1].value
        log = [message for rank in (0, 2) for message in actual[rank].value]
    assert len(log) == 2
    for message in log:
        assert "rank 1" in message
        assert not TIMED_OUT.search(message)


def silent(comm, verb, complained):
    """Rank 1 sends nothing until rank 0 has raised an error, however long that takes."""
    comm.all_gather(torch.zeros(3))
    set_timeout(comm, SHORT)
    if comm.rank == 1:
        while not complained.exists():
            time.sleep(0.01)
        return None
    args = {"all_gather": [torch.zeros(3)], "exchange": [[], [Message(1, torch.zeros(3))]]}
    try:
        with pytest.MonkeyPatch.context() as patch:  # a busy machine may take long to answer
            patch.setattr(roll_call, "GRACE", PATIENCE)
            return complaint(getattr(comm, verb), *args[verb])
    finally:
        complained.touch()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("verb", ["all_gather", "exchange"])
def test_a_silent_rank_is_an_error(transport, verb, tmp_path):
    message = everywhere(transport, 2, silent, verb, tmp_path / "complained")[0]
    expected = "rank 0 waited 1.5 s for rank 1"
    if transport == "gloo":
        expected = "rank 1 did not reach this call" if verb == "all_gather" else "rank 1: Timed out"
    assert expected in message


def stopped(comm, folder):
    """Rank 1 is stopped until the others have raised errors."""
    processes = comm.gather_objects(os.getpid())
    set_timeout(comm, SHORT)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    try:
        actual = complaint(comm.all_gather, torch.zeros(3))
        meet(folder, comm.rank // 2, 2)
    finally:
        os.kill(processes[1], signal.SIGCONT)
    return actual


def test_a_stopped_rank_is_named(tmp_path):
    actual = everywhere("gloo", 3, stopped, tmp_path)
    for message in (actual[0], actual[2]):
        assert re.search(NO_RESPONSE, message)


def one_is_late(rank, group, folder):
    """Rank 1 creates no balancer before the others have given up."""
    if rank == 1:
        return meet(folder, rank, 3)
    try:
        return complaint(partial(Balancer, experts=3, timeout=SHORT))
    finally:
        meet(folder, rank, 3)


def test_a_rank_that_creates_no_balancer_is_named(tmp_path):
    actual = shared_pool().run(3, one_is_late, tmp_path)
    for message in (actual[0], actual[2]):
        assert re.search(NO_RESPONSE, message)


def test_errors_carry_ranks_and_place():
    error = CommunicationError("rank 3 died", ranks=[3])
    error.at("the loads of layer 0 (step 2)")
    error.at("an outer place")
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert str(each) == "at the loads of layer 0 (step 2): rank 3 died"
        assert (each.ranks, each.place) == ((3,), "the loads of layer 0 (step 2)")
    assert (UltraEPError("x").ranks, UltraEPError("x").place) == ((), "")


def test_a_store_that_does_not_respond_is_named(monkeypatch):
    def lost(*_):
        raise RuntimeError("connection reset")

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        alone = roll_call.RollCall(dist.group.WORLD, ["rank 0"])
        assert alone.missing().text == ""
        monkeypatch.setattr(alone, "_answers", lost)
        assert "store of the process group does not respond (rank 0" in alone.missing().text
    finally:
        dist.destroy_process_group()


def lose_a_rank_of_another_domain(rank, group, folder):
    """Rank 0 waits for the group, which loses rank 3; rank 1 waits for rank 0 in their domain."""
    comm = connect(group, timeout=PATIENCE)
    inside = comm.part(2)
    meet(folder, rank, 4)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return named_by(comm.all_gather if rank in (0, 2) else inside.all_gather, torch.zeros(1))


def test_a_killed_rank_is_named_at_once_inside_and_outside_of_its_domain(tmp_path):
    outcomes = shared_pool().outcomes(4, lose_a_rank_of_another_domain, tmp_path)
    ends = {outcome.rank: outcome.value for outcome in outcomes if outcome.kind == "result"}
    assert ends.keys() == {0, 1, 2}
    for rank, (text, ranks) in ends.items():
        assert ranks[0] == 3
        assert re.search(rf"no response from ranks? 3\b.*; noticed by rank {rank}: ", text)
        assert not TIMED_OUT.search(text)
        assert "\n" not in text


def lose_a_rank_inside(rank, group, folder):
    """Rank 3 leaves, then rank 2, which waits for it in their domain; then all others call."""
    comm = connect(group, timeout=PATIENCE)
    inside, named = comm.part(2), ("", [3])
    if rank == 2:
        named = named_by(inside.all_gather, torch.zeros(1))
    if rank >= 2:
        inside.close()
        comm.close()
        (folder / str(rank)).touch()
        return named
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)
    return named_by(comm.all_gather, torch.zeros(1))


def test_a_cause_inside_a_domain_is_named_by_the_others(tmp_path):
    for text, ranks in shared_pool().run(4, lose_a_rank_inside, tmp_path):
        assert ranks == [3], text


def wait_for_a_late_rank(rank, group, folder):
    """Rank 3 is late. Rank 2 waits for it in their domain; the others wait for both, longer."""
    comm = connect(group, timeout=2 * SHORT)
    inside = comm.part(2)
    meet(folder, rank, 4)
    if rank == 3:
        time.sleep(3 * SHORT)
        return "", [3]
    if rank == 2:
        time.sleep(SHORT / 2)
    return named_by(inside.all_gather if rank == 2 else comm.all_gather, torch.zeros(1))


def test_a_rank_that_waits_inside_its_domain_is_not_named(tmp_path):
    outcomes = shared_pool().run(4, wait_for_a_late_rank, tmp_path)
    assert [ranks for _, ranks in outcomes] == [[3]] * 4
