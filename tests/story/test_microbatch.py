"""The verbs of a microbatch: their order, inputs and lifetime; spare slots are lent."""

import weakref

import pytest
import torch
from dense import Example
from microbatches import planned
from torch.autograd.graph import saved_tensors_hooks

from ultraep import Balancer, ConfigError, LocalGroup, SlotError
from ultraep.arrays import PADDING
from ultraep.dispatch import combine, dispatch
from ultraep.layer import run_stages
from ultraep.microbatch import Layer
from ultraep.runtime.connect import connect

IDS = torch.tensor([[0, 1], [2, 3]])
BEFORE = {"plan": "count", "replicate": "plan", "reroute": "plan", "dispatch": "reroute"}


def begun():
    return Balancer("alone", experts=4).begin(Layer(0, {"w": torch.zeros(4, 2)}), IDS)


@pytest.mark.parametrize("verb", BEFORE)
def test_a_verb_that_is_called_too_early_names_the_missing_verb(verb):
    with pytest.raises(ConfigError, match=rf"call {BEFORE[verb]}\(\) first"):
        getattr(begun(), verb)()


def test_dispatch_needs_tokens_and_gates():
    microbatch = begun()
    assert microbatch.count().tolist() == [[1, 1, 1, 1]]
    microbatch.plan()
    assert microbatch.reroute().slots.tolist() == IDS.tolist()  # enough for other dispatchers
    with pytest.raises(ConfigError, match=r"pass both to Balancer\.begin"):
        microbatch.dispatch()


def test_all_stages_need_stage_6():
    gates, tokens = torch.ones(2, 2), torch.zeros(2, 3)
    with pytest.raises(ConfigError, match="layer 7 has no `serve`"):
        run_stages(Balancer("alone", experts=4), Layer(7), IDS, gates, tokens)


def test_backward_keeps_no_inputs():
    """Only replicas and rows stay alive until backward."""
    example = Example([20])
    balancer = Balancer("alone", experts=8)
    experts = example.layer(balancer).experts
    ids = torch.arange(40).reshape(20, 2) % 8
    gates = torch.ones(20, 2, dtype=torch.float64)
    kept = [weakref.ref(ids), weakref.ref(gates)]
    y, _ = run_stages(balancer, Layer(0, experts.bundle, experts), ids, gates, example.inputs[0])
    del ids, gates
    assert y.requires_grad
    assert [ref() for ref in kept] == [None, None]


# Spare slots are lent, not overwritten while in use, and returned after errors.


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


# Rows travel to slots and back


class Counting:
    """A communicator that records the shapes that it sends."""

    def __init__(self, comm):
        self._comm, self.shapes = comm, []
        self.rank, self.size = comm.rank, comm.size

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def all_to_all(self, rows, *counts):
        self.shapes.append(list(rows.shape))
        return self._comm.all_to_all(rows, *counts)


def exchange_of_one(ids, comm=None):
    balancer = Balancer(comm or connect(None), experts=4)
    return planned(balancer, ids, policy="none")[0].reroute()


PADDED = torch.tensor([[0, 1], [2, PADDING], [3, 3], [1, 0], [PADDING, PADDING]])


def test_dispatch_and_combine_save_no_rows():
    saved = []
    exchange = exchange_of_one(PADDED)
    tokens, weights = torch.randn(5, 8, requires_grad=True), torch.rand(5, 2, requires_grad=True)
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        arrivals = dispatch(tokens, weights, exchange)
        combine(arrivals.rows, exchange).sum().backward()
    assert [tensor.numel() for tensor in saved] == [1, 1]  # a label of the exchange each


def test_a_layer_saves_inputs_and_activations_but_no_outputs():
    example = Example([30], top_k=5, hidden=16, ffn=12)
    layer = example.layer(Balancer("alone", experts=8))
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(example.inputs[0].clone().requires_grad_())
    large = [list(tensor.shape) for tensor in saved if len(tensor) == 30 * 5 and tensor.ndim > 1]
    assert sorted(large) == [[150, 16], [150, 24]]


def test_gradients_of_frozen_gates_are_not_sent():
    def work(comm):
        counting = Counting(comm)
        exchange = exchange_of_one(PADDED, counting)
        tokens = torch.randn(5, 8, requires_grad=True)
        arrivals = dispatch(tokens, torch.rand(5, 2), exchange)
        assert arrivals.rows.requires_grad
        assert not arrivals.gates.requires_grad
        combine(arrivals.rows * arrivals.gates[:, None], exchange).sum().backward()
        return counting.shapes

    first, second = LocalGroup(2).run(work)
    # rows, gates, outputs, gradients of outputs, gradients of rows
    assert first == [[7, 8], [7], [8, 8], [7, 8], [8, 8]]
    assert second == [[7, 8], [7], [6, 8], [7, 8], [6, 8]]
