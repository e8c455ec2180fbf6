"""Replicas are reused only if their weights cannot have changed."""

from contextlib import closing, nullcontext

import numpy as np
import pytest
import torch
from cases import skewed_ids
from dense import Example, assert_close, dense
from microbatches import planned
from ranks import shared_pool
from torch import nn

from ultraep import Balancer, LocalGroup
from ultraep.bundle import Layout, resolve
from ultraep.hops import MODES

pytestmark = pytest.mark.usefixtures("one_thread")


class Replicated:
    """One rank that replicates repeatedly; `step` returns the bytes it sent."""

    def __init__(self, comm, **options):
        self.balancer = Balancer._with_settings(comm, slots=2, **{"experts": 8} | options)
        self.homes = self.balancer.topology.home_experts(comm.rank)
        self.ids = skewed_ids(comm.rank)

    def weights(self, scale=1.0):
        return {"w": scale * torch.arange(8.0)[self.homes.tolist(), None] * torch.ones(8, 5)[0]}

    def step(self, bundle, *, layer=0, ids=None, value=None):
        """Check the slots against `value`, a function of the expert, and count bytes."""
        self.balancer.reset_stats()
        ids = self.ids if ids is None else ids
        microbatch, plan = planned(self.balancer, ids, bundle, layer=layer)
        assert plan.num_replicas > 0
        with microbatch.replicate() as replicas:
            self.check(replicas, plan, value)
        self.nbytes = plan.num_replicas * Layout.of(resolve(bundle), len(self.homes)).nbytes
        return self.balancer.stats()["weights_bytes_sent"]

    def check(self, replicas, plan, value):
        slots = replicas.tensors()
        for expert, host, slot in plan.replicas.tolist():
            if host == self.balancer.rank and value is not None:
                assert slots["w"][slot].tolist() == [value(expert)] * 5


def on_ranks(work, **options):
    """Return the bytes that all ranks sent in each step of `work`, a generator on every rank."""

    def on_rank(comm):
        return list(work(Replicated(comm, **options)))

    return [sum(steps) for steps in zip(*LocalGroup(4).run(on_rank), strict=True)]


def doubled(expert):
    return 2.0 * expert


@pytest.mark.parametrize("promised", [False, True])
@pytest.mark.parametrize("relay", MODES)
def test_weights_are_sent_once_if_they_are_promised_unchanged(relay, promised):
    def work(rank):
        bundle = rank.weights()
        with rank.balancer.unchanged_weights() if promised else nullcontext():
            yield from (rank.step(bundle, value=float) for _ in range(3))
        yield rank.nbytes if rank.balancer.rank == 0 else 0

    *sent, nbytes = on_ranks(work, relay=relay)
    assert sent == ([nbytes, 0, 0] if promised else [nbytes] * 3)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_layers_share_slots_or_have_their_own(in_flight):
    def work(rank):
        bundles = rank.weights(), rank.weights(2.0)
        with rank.balancer.unchanged_weights():
            for layer in (0, 1, 1, 0):
                yield rank.step(bundles[layer], layer=layer, value=lambda e, n=layer: (n + 1.0) * e)

    first, second, *again = on_ranks(work, in_flight=in_flight)
    assert first == second > 0
    assert again == [0, first if in_flight == 1 else 0]


# Without a promise


@torch.no_grad()
def optimizer_step(weight):
    weight.grad = -weight
    torch.optim.SGD([weight], lr=1.0).step()


WRITES = {  # each doubles the weight
    "data": lambda weight: weight.data.mul_(2),
    "numpy": lambda weight: np.multiply(weight.detach(), 2, out=weight.detach().numpy()),
    "in place": lambda weight: weight.detach().mul_(2),
    "optimizer": optimizer_step,
    "new data": lambda weight: setattr(weight, "data", 2 * weight.data),
}


@pytest.mark.parametrize("write", WRITES)
def test_no_write_is_missed(write):
    def work(rank):
        weight = nn.Parameter(rank.weights()["w"])
        yield rank.step({"w": weight}, value=float)
        WRITES[write](weight)
        yield rank.step({"w": weight}, value=doubled)

    first, second = on_ranks(work)
    assert first == second > 0


# With a promise


def test_a_promise_ends_with_its_block():
    def work(rank):
        weight = nn.Parameter(rank.weights()["w"])
        for value in (float, doubled):
            with rank.balancer.unchanged_weights():
                yield rank.step({"w": weight}, value=value)
                with rank.balancer.unchanged_weights():
                    yield rank.step({"w": weight}, value=value)
                yield rank.step({"w": weight}, value=value)
            WRITES["data"](weight)

    first, *others = on_ranks(work)
    assert first > 0
    assert others == [0, 0, first, 0, 0]


def test_writes_that_torch_counts_end_a_promise():
    def work(rank):
        bundle = rank.weights()
        with rank.balancer.unchanged_weights():
            yield rank.step(bundle, value=float)
            bundle["w"].mul_(2)
            yield rank.step(bundle, value=doubled)
            bundle["w"][:] += 1
            yield rank.step(bundle, value=lambda e: 2.0 * e + 1)
            yield rank.step(rank.weights(3.0), value=lambda e: 3.0 * e)
            bundle["w"].data = rank.weights(4.0)["w"]
            yield rank.step(bundle, value=lambda e: 4.0 * e)

    first, *others = on_ranks(work)
    assert others == [first] * 4
    assert first > 0


def test_another_tensor_in_the_same_memory_is_sent():
    def work(rank):
        memory = torch.zeros(len(rank.homes), 5)
        with rank.balancer.unchanged_weights():
            for number in range(5):
                weight = torch.empty(0).set_(memory.untyped_storage(), 0, memory.shape)
                weight.copy_(rank.weights(float(number))["w"])
                yield rank.step({"w": weight}, value=lambda e, n=number: float(n * e))
                del weight

    assert len(set(on_ranks(work))) == 1


def test_only_the_experts_of_ranks_that_changed_are_sent_again():
    homes = [0, 1, 2, 3, 0, 1, 2, 3]

    def work(comm):
        rank = Replicated(comm, experts=homes, relay="direct")
        bundle = rank.weights()
        with rank.balancer.unchanged_weights():
            sent = [rank.step(bundle, value=float)]
            if comm.rank == 0:
                bundle["w"].add_(1)
            sent.append(rank.step(bundle, value=lambda e: float(e + (homes[e] == 0))))
        return sent

    results = LocalGroup(4).run(work)
    first, second = (sum(sent) for sent in zip(*results, strict=True))
    assert 0 < second < first
    assert [sent for _, sent in results] == [second, 0, 0, 0]


def test_one_rank_alone_may_promise():
    def work(comm):
        rank = Replicated(comm, experts=[0, 1, 2, 3, 0, 1, 2, 3], relay="direct")
        bundle = rank.weights()
        with rank.balancer.unchanged_weights() if comm.rank == 0 else nullcontext():
            return [rank.step(bundle, value=float) for _ in range(2)]

    first, *others = LocalGroup(4).run(work)
    assert first[0] > first[1] == 0
    assert all(sent[0] == sent[1] for sent in others)


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [0]], ids=str)
def test_weights_changed(ranks):
    def work(rank):
        weight = nn.Parameter(rank.weights()["w"])
        homes = rank.balancer.topology.home_of_expert
        with rank.balancer.unchanged_weights():
            yield rank.step({"w": weight}, value=float)
            if rank.balancer.rank in ranks:
                WRITES["data"](weight)
                rank.balancer.weights_changed()
            yield rank.step({"w": weight}, value=lambda e: e * (1.0 + (homes[e] in ranks)))

    first, second = on_ranks(work)
    assert 0 < second <= first


def test_backward_reuses_the_replicas_of_its_forward_pass():
    def work(rank):
        balancer, microbatches = rank.balancer, []
        for scale in (1.0, 2.0):
            microbatches.append(planned(balancer, rank.ids, rank.weights(scale))[0].replicate())
            with microbatches[-1]:
                pass
        balancer.reset_stats()
        for replicas in microbatches:
            with replicas:
                yield balancer.stats()["weights_bytes_sent"]

    assert on_ranks(work, in_flight=2) == [0, 0]
    assert all(on_ranks(work, in_flight=1))


def test_another_plan_sends_missing_replicas():
    def work(rank):
        bundle = rank.weights()
        other = torch.cat([rank.ids[:20], torch.full((60, 1), 7)])
        with rank.balancer.unchanged_weights():
            yield rank.step(bundle, value=float)
            yield rank.step(bundle, ids=other, value=float)
            yield rank.step(bundle, ids=rank.ids, value=float)

    assert all(on_ranks(work))


# Functions that return weights


def test_functions_are_called_again_when_slots_are_refilled():
    def work(comm):
        rank = Replicated(comm)
        balancer, now = rank.balancer, rank.weights()
        bundle = {"w": lambda: now["w"]}
        microbatch, plan = planned(balancer, rank.ids, bundle)
        replicas = microbatch.replicate()
        with replicas:
            pass
        old = now
        now = rank.weights()  # elsewhere in memory
        old["w"].fill_(-1)
        rank.step(rank.weights(5.0), layer=1)  # overwrites the slots
        with replicas:
            rank.check(replicas, plan, float)

    LocalGroup(4).run(work)


def test_promises_hold_for_functions():
    def work(rank):
        bundle = {"w": lambda: rank.weights()["w"]}
        with rank.balancer.unchanged_weights():
            yield rank.step(bundle, value=float)
            yield rank.step(bundle, value=float)

    first, second = on_ranks(work)
    assert first > second == 0


# Whole layers, against the dense twin

SCALES = (1.0, 2.0, 3.0, 4.0)


def assert_follows(example, run):
    """Compare the outputs that `run(balancer, states, x)` yields for each state with the twin."""
    base = example.state["experts.down_proj"]
    states = [{**example.state, "experts.down_proj": scale * base} for scale in SCALES]

    def work(comm):
        balancer = Balancer(comm, experts=example.experts)
        return [y.detach() for y in run(balancer, states, example.inputs[comm.rank])]

    results = LocalGroup(example.ranks).run(work)
    for state, *outputs in zip(states, *results, strict=True):
        example.state = state
        assert_close(torch.cat(outputs), dense(example).output)


def test_a_layer_called_with_other_weights():
    def run(balancer, states, x):
        layer = example.layer(balancer)
        for scale in SCALES:
            weights = {"experts.down_proj": scale * layer.experts.down_proj.detach()}
            with torch.no_grad():
                y = torch.func.functional_call(layer, weights, (x,))
            del weights  # the next weights may use this memory
            yield y

    assert_follows(example := Example([30] * 4), run)


def test_a_layer_made_in_inference_mode():
    def run(balancer, states, x):
        with torch.inference_mode():
            layer = example.layer(balancer)
            for state in states:
                layer.load_full_state_dict(state)
                yield layer(x)

    assert_follows(example := Example([30] * 4), run)


def test_a_layer_cast_to_float32_and_back():
    example = Example([30] * 4)
    example.state = {name: t.float().double() for name, t in example.state.items()}

    def run(balancer, states, x):
        layer = example.layer(balancer)
        homes = balancer.topology.home_experts(balancer.rank).tolist()
        for state in states:
            layer.to(torch.float32).to(torch.float64)
            layer.experts.down_proj.data = state["experts.down_proj"][homes]
            yield layer(x)

    assert_follows(example, run)


def broadcast_experts(rank, group, example):
    """All ranks get the experts of rank 1, by a collective whose writes torch does not count."""
    with closing(Balancer(group, experts=example.experts)) as balancer:
        layer = example.layer(balancer)
        before = layer(example.inputs[rank]).detach()
        with torch.no_grad():
            for parameter in layer.experts.parameters():
                torch.distributed.broadcast(parameter, 1, group=group)
        return before, layer(example.inputs[rank]).detach()


def test_weights_written_by_a_collective():
    example = Example([40] * 2)
    results = shared_pool().run(2, broadcast_experts, example)
    before, after = (torch.cat(y) for y in zip(*results, strict=True))
    assert_close(before, dense(example).output)
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        example.state[name] = example.state[name][example.experts // 2 :].repeat(2, 1, 1)
    assert_close(after, dense(example).output)
