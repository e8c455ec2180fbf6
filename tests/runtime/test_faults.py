"""Ranks that raise, die, are slow or disagree; files left behind; the choice of a communicator."""

import errno
import mmap
import os
import pickle
import platform
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
    RankPool,
    everywhere,
    leftovers,
    meet,
    on_communicator,
    set_timeout,
    shared_pool,
)

from ultraep import Balancer
from ultraep.comm import Message
from ultraep.errors import CommunicationError, ConfigError, UltraEPError
from ultraep.runtime import roll_call
from ultraep.runtime.connect import connect
from ultraep.runtime.local import LocalCommunicator
from ultraep.runtime.shared_memory import SharedMemoryCommunicator
from ultraep.runtime.torch_dist import TorchDistCommunicator

SHORT = 1.5  # seconds
# On a busy machine, other ranks may be too slow to answer as well.
NO_RESPONSE = r"no response from (rank 1|ranks .*\b1\b.*) \(died, stopped, left or not there yet\)"


def complaint(act, *args):
    """Return the message of the error."""
    with pytest.raises(CommunicationError) as caught:
        act(*args)
    return str(caught.value)


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
        args = (transport, raise_in_the_middle, (log, tmp_path), PATIENCE)
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
    args = (verb, tmp_path / "complained")
    message = everywhere(transport, 2, silent, *args)[0]
    expected = {
        "local": "rank 0 waited 1.5 s for rank 1",
        "shared": "no progress in 1.5 s with rank 1",
        "sockets": "rank 1 did not reach this call" if verb == "all_gather" else "with rank 1: ",
    }
    assert expected[transport] in message


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


def test_a_stopped_rank_is_named_over_sockets(tmp_path):
    actual = everywhere("sockets", 3, stopped, tmp_path)
    for message in (actual[0], actual[2]):
        assert re.search(NO_RESPONSE, message)


def one_is_late(rank, group, transport, folder):
    """Rank 1 creates no balancer before the others have given up."""
    if rank == 1:
        return meet(folder, rank, 3)
    try:
        return complaint(partial(Balancer, experts=3, timeout=SHORT, transport=transport))
    finally:
        meet(folder, rank, 3)


@pytest.mark.parametrize("transport", ["auto", pytest.param("sockets", marks=pytest.mark.slow)])
def test_a_rank_that_creates_no_balancer_is_named(transport, tmp_path):
    actual = shared_pool().run(3, one_is_late, transport, tmp_path)
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
        alone = roll_call.RollCall(dist.group.WORLD, 0, ["rank 0"])
        assert alone.missing().text == ""
        monkeypatch.setattr(alone, "_answers", lost)
        assert "store of the process group does not respond (rank 0" in alone.missing().text
    finally:
        dist.destroy_process_group()


def disagree(comm):
    if comm.rank == 0:
        comm.exchange([Message(1, torch.zeros(3))], [])
        return None
    complained = complaint(comm.exchange, [], [Message(0, torch.zeros(2))])
    assert complaint(comm.all_gather, torch.zeros(1)).endswith("failed before")
    return complained


def test_sizes_that_disagree_are_named():
    message = everywhere("shared", 2, disagree)[1]
    assert "rank 0 sent 12 bytes, 8 were expected" in message


def give_up(comm):
    if comm.rank == 1:
        return comm._wire.abort()
    return complaint(comm.all_gather, torch.zeros(3))


def test_an_abort_stops_the_others_and_cleans_up():
    for message in everywhere("shared", 3, give_up)[::2]:
        assert "rank 1 gave up" in message or "because of rank 1" in message


def without_descriptors(comm):
    if comm.rank == 0:
        comm.exchange([Message(1, torch.zeros(1 << 18))], [])
        return complaint(comm.all_gather, torch.zeros(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmap, "mmap", raise_too_many)
        return complaint(comm.exchange, [], [Message(0, torch.zeros(1 << 18))])


def raise_too_many(*args, **options):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_message_that_cannot_be_opened_is_an_error_on_both_ends():
    sender, receiver = everywhere("shared", 2, without_descriptors)
    assert "no message of rank 0: [Errno 24]" in receiver
    assert "rank 1 gave up, because of rank 0" in sender


def lose_one(rank, group, folder):
    # Shared memory would wait as long as the group: longer than this takes.
    comms = [connect(group, transport="shared"), TorchDistCommunicator(group, PATIENCE)]
    for comm in comms:
        comm.all_gather(torch.zeros(3))
    meet(folder, rank, 3)
    if rank == 2:  # what it sent to rank 0 stays there, unread
        comms[0].exchange([Message(0, torch.zeros(1 << 18))], [])
        os.kill(os.getpid(), signal.SIGKILL)
    complaints = [
        complaint(comms[0].exchange, [], [Message(1 - rank, torch.zeros(1))]),
        complaint(comms[1].all_gather, torch.zeros(1)),
    ]
    comms[0].close()
    return complaints


def named_by(verb):
    with pytest.raises(CommunicationError) as caught:
        verb(torch.zeros(1))
    return str(caught.value), list(caught.value.ranks)


def lose_a_rank_of_another_domain(rank, group, folder, transport):
    """Rank 0 waits for the group, which loses rank 3; rank 1 waits for rank 0 in their domain."""
    comm = connect(group, transport=transport, timeout=PATIENCE)
    inside = comm.part(2)
    meet(folder, rank, 4)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return named_by(comm.all_gather if rank in (0, 2) else inside.all_gather)


@pytest.mark.parametrize("transport", ["shared", "sockets"])
def test_a_cause_in_another_domain_is_named(transport, tmp_path):
    with RankPool(4) as pool:
        outcomes = pool.outcomes(4, lose_a_rank_of_another_domain, tmp_path, transport)
    ends = {outcome.rank: outcome.value for outcome in outcomes if outcome.kind == "result"}
    assert ends.keys() == {0, 1, 2}
    assert all(ranks[0] == 3 for _, ranks in ends.values())
    assert "rank 0 gave up, because of rank 3; noticed by rank 1" in ends[1][0]
    assert not any(TIMED_OUT.search(text) for text, _ in ends.values())


def wait_for_a_late_rank(rank, group, folder):
    """Rank 3 is late. Rank 2 waits for it in their domain; the others wait for both, longer."""
    comm = connect(group, transport="shared", timeout=3.0)
    inside = comm.part(2)
    meet(folder, rank, 4)
    if rank == 3:
        time.sleep(6)
        return "", [3]
    if rank == 2:
        time.sleep(1)
    return named_by(inside.all_gather if rank == 2 else comm.all_gather)


def test_a_rank_that_waits_inside_its_domain_is_not_named(tmp_path):
    with RankPool(4) as pool:
        outcomes = pool.outcomes(4, wait_for_a_late_rank, tmp_path)
    assert [outcome.value[1] for outcome in outcomes] == [[3]] * 4


def wait_in_different_calls(comm):
    """Rank 1 is late. Rank 0 waits for it in an exchange, rank 2 for both, longer."""
    if comm.rank == 2:
        return named_by(comm.all_gather)[1]
    time.sleep(1 if comm.rank == 0 else 6)
    return named_by(lambda x: comm.exchange([], [Message(1, x)]))[1] if comm.rank == 0 else [1]


def test_a_rank_that_waits_does_not_name_itself():
    assert everywhere("sockets", 3, wait_in_different_calls, timeout=3.0) == [[1], [1], [0, 1]]


def lose_a_rank_inside(rank, group, folder, transport):
    """Rank 1 leaves, then rank 0, which waits for it in their domain; then all others call."""
    comm = connect(group, transport=transport, timeout=PATIENCE)
    inside, named = comm.part(2), ("", [1])
    if rank == 0:
        named = named_by(inside.all_gather)
    if rank < 2:
        inside.close()
        comm.close()
        (folder / str(rank)).touch()
        return named
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)
    return named_by(comm.all_gather)


@pytest.mark.parametrize("transport", ["shared", "sockets"])
def test_a_cause_inside_a_domain_is_named_by_the_others(transport, tmp_path):
    for text, ranks in shared_pool().run(4, lose_a_rank_inside, tmp_path, transport):
        assert ranks == [1], text


def leave_without_close(rank, group):
    comm = connect(group, transport="shared", timeout=PATIENCE)
    leave_without_close.kept = comm  # until the interpreter ends
    if rank == 0:
        comm.exchange([Message(1, torch.zeros(1 << 18))], [])


@pytest.fixture(scope="module")
def end_of_ranks(tmp_path_factory):
    """Return the errors about rank 2, and the files left while and after the others ran."""
    folder = tmp_path_factory.mktemp("ranks")
    with RankPool(3) as pool:
        actual = {outcome.rank: outcome for outcome in pool.outcomes(3, lose_one, folder)}
        assert actual[2].kind == "lost"
        left = [leftovers(pool.pids)]
        pool.run(2, leave_without_close)
        left.append(leftovers(pool.pids))
    return actual[0].value + actual[1].value, [*left, leftovers(pool.pids)]


def test_a_killed_rank_is_noticed_and_named(end_of_ranks):
    complaints, (left, _, _) = end_of_ranks
    for message in complaints:
        assert re.search(r"rank 2 .*died|because of rank 2", message)
        assert not TIMED_OUT.search(message)
        assert "\n" not in message
    assert left == []


def test_an_interpreter_that_ends_leaves_nothing(end_of_ranks):
    _, (_, before, after) = end_of_ranks
    assert before == after == []  # an unread message has no file of its own


def drop(rank, group):
    for _ in range(3):
        comm = connect(group, transport="shared", timeout=PATIENCE)
        comm.exchange([Message(1 - rank, torch.zeros(1 << 18))], [])
        del comm


def test_a_communicator_that_is_garbage_collected_cleans_up():
    before = set(leftovers(shared_pool().pids))
    shared_pool().run(2, drop)
    assert set(leftovers(shared_pool().pids)) <= before


def last_words(comm):
    if comm.rank == 0:
        comm.exchange([Message(1, torch.ones(1 << 18))], [])
    else:
        time.sleep(0.2)
        place = torch.zeros(1 << 18)
        comm.exchange([], [Message(0, place)])
        assert place.all()


def test_the_last_message_is_read_before_its_sender_is_gone():
    everywhere("shared", 2, last_words)


# The choice of a communicator.


def choose(rank, group):
    chosen = [connect(group, transport=name) for name in ("auto", "shared", "sockets")]
    for comm in chosen:
        comm.close()
    return [type(comm) for comm in chosen]


def test_the_choice_of_a_transport():
    shared, sockets = SharedMemoryCommunicator, TorchDistCommunicator
    assert shared_pool().run(2, choose) == [[shared, shared, sockets]] * 2
    assert isinstance(connect(None), LocalCommunicator)
    with pytest.raises(ConfigError, match="auto, shared, sockets, got 'pigeon'"):
        connect(None, transport="pigeon")


def on_another_machine(rank, group):
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(platform, "machine", lambda: "riscv64")
        with pytest.raises(ConfigError, match="rank 1 runs on Linux riscv64"):
            connect(group, transport="shared")
        return type(connect(group))


def test_other_machines_are_refused():
    assert shared_pool().run(2, on_another_machine) == [TorchDistCommunicator] * 2
