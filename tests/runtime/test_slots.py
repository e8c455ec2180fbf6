"""Spare slots are lent, not overwritten while in use, and returned after errors."""

import pytest
import torch
from microbatches import planned

from ultraep import Balancer, LocalGroup, SlotError
from ultraep.bundle import Layout
from ultraep.runtime.messages.replicas import SlotPool

CPU = torch.device("cpu")
LAYOUT = Layout.of({"w": torch.zeros(1, 5)}, 1)


def test_a_borrower_gets_its_last_buffer():
    pool = SlotPool(1, 2)
    with pool.lend(LAYOUT, CPU, "one") as first, pool.lend(LAYOUT, CPU, "two") as second:
        assert first is not second
    for last in (second, first):
        with pool.lend(LAYOUT, CPU, "me", last) as buffer:
            assert buffer is last
    with pool.lend(LAYOUT, CPU, "me", second) as buffer, pool.lend(LAYOUT, CPU, "you", second):
        assert buffer is second
    assert pool.nbytes == 2 * LAYOUT.nbytes


@pytest.mark.parametrize(("layers", "times"), [(1, 1), (3, 5)])
def test_backward_sends_weights_again_if_another_layer_has_used_the_slots(layers, times):
    def work(comm):
        rank = Rank(comm)
        every = [rank.replicas(layer) for layer in range(layers)]
        for replicas in (*every, *reversed(every)):
            with replicas as filled:
                filled.tensors()
        return rank.balancer.stats()["weights_copies_sent"]

    assert LocalGroup(2).run(work) == [times, 0]


def hot(comm, tokens=40):
    return torch.zeros(tokens, 1, dtype=torch.int64)


class Rank:
    """One rank with a bundle, all of whose tokens go to expert 0."""

    def __init__(self, comm, **options):
        self.balancer = Balancer._with_settings(comm, experts=4, **options)
        homes = len(self.balancer.topology.home_experts(comm.rank))
        self.bundle = {"w": torch.full((homes, 3), float(comm.rank))}
        self.ids = hot(comm)

    def replicas(self, layer=0):
        microbatch, plan = planned(self.balancer, self.ids, self.bundle, layer=layer)
        assert plan.num_replicas == 1
        return microbatch.replicate()


def test_a_second_borrower_of_the_only_buffer_is_refused():
    def work(comm):
        rank = Rank(comm)
        first, second = rank.replicas(layer=5), rank.replicas(layer=6)
        with first:
            with pytest.raises(SlotError, match=r"layer 6 \(step 0\).*layer 5 \(step 0\)"):
                second.__enter__()
            with pytest.raises(SlotError, match=r"layer 5 \(step 0\)"):
                first.__enter__()
        with second as filled:
            return filled.tensors()["w"].tolist()

    assert LocalGroup(2).run(work)[1] == [[0.0, 0.0, 0.0]]


def test_two_microbatches_fill_two_buffers():
    def work(comm):
        rank = Rank(comm, in_flight=2)
        first, second, third = (rank.replicas(layer) for layer in range(3))
        with first as one, second as two:
            assert one.tensors()["w"].data_ptr() != two.tensors()["w"].data_ptr()
            with pytest.raises(SlotError):
                third.__enter__()
        with third:
            pass

    LocalGroup(2).run(work)


def test_an_error_returns_the_slots():
    def work(comm):
        rank = Rank(comm)
        replicas = rank.replicas()
        with pytest.raises(ZeroDivisionError), replicas:
            raise ZeroDivisionError
        with replicas, pytest.raises(SlotError):
            replicas.__enter__()
        with pytest.raises(SlotError, match=r"layer 0 \(step 0\) are in their slots only inside"):
            replicas.tensors()
        with rank.replicas() as filled:
            return filled.tensors()["w"].tolist()

    assert LocalGroup(2).run(work)[1] == [[0.0, 0.0, 0.0]]
