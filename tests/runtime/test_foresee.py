"""Steps whose routes are known before: the same plans and gradients, with replicas sent ahead."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from ranks import TRANSPORTS, everywhere, shared_pool
from shared_peers import SharedPeers
from torch import nn
from torch.utils.checkpoint import checkpoint

from ultraep import (
    BalanceConfig,
    BalancedMoE,
    Balancer,
    CommunicationError,
    ConfigError,
    LoadError,
    LocalGroup,
    read_trace,
)
from ultraep.backends.triton.device import interpreted
from ultraep.ops.formats import FORMATS
from ultraep.routing import Routing
from ultraep.runtime.messages.replicas import MessageReplicas
from ultraep.runtime.microbatch import NO_PASS, backward_pass

RANKS, LAYERS, TOKENS, EXPERTS, HIDDEN = 2, 4, 24, 6, 8
FORMAT = next(iter(FORMATS))
BALANCE = BalanceConfig(objective="balance")


class Given(nn.Module):
    """A router whose choices are given."""

    ids = torch.empty(0)

    def forward(self, tokens):
        gates = tokens[:, : self.ids.shape[1]].sigmoid() + 0.5
        return Routing(self.ids, gates)


def drawn_routes(rank, seed, tokens=TOKENS, layers=LAYERS):
    """Return `[T, 2]` ids of every layer; the hot expert moves from layer to layer."""
    draw = torch.Generator().manual_seed(100 * seed + rank)
    routes = torch.randint(EXPERTS, (layers, tokens, 2), generator=draw)
    for layer, ids in enumerate(routes):
        ids[: 2 * tokens // 3, 0] = (layer + seed) % EXPERTS
        ids[-1, 1] = -1
    return list(routes)


class Model:
    """Some balanced layers of one rank, one after the other."""

    def __init__(self, balancer, *, layers=LAYERS, checkpointed=False):
        self.balancer, self.checkpointed = balancer, checkpointed
        self.layers = [
            BalancedMoE.swiglu(
                HIDDEN,
                16,
                EXPERTS,
                2,
                balancer=balancer,
                seed=3 * n,
                dtype=torch.float64,
            )
            for n in range(layers)
        ]
        for layer in self.layers:
            layer.router = Given()

    def forward(self, routes, seed=0):
        rank = self.balancer.rank
        draw = torch.Generator().manual_seed(1000 + 10 * seed + rank)
        x = torch.randn(len(routes[0]), HIDDEN, generator=draw, dtype=torch.float64)
        x = self.x = x.requires_grad_()
        for layer, ids in zip(self.layers, routes, strict=True):
            layer.router.ids = ids
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x))
        return x

    def gradients(self):
        gradients = {"x": self.x.grad}
        for number, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                gradients[f"{number}.{name}"] = parameter.grad.clone()
                parameter.grad = None
        return gradients

    def step(self, routes, seed=0):
        y = self.forward(routes, seed)
        y.square().sum().backward()
        return {"y": y.detach(), **self.gradients()}

    def replicas(self):
        return [layer.last_plan.to_host().num_replicas for layer in self.layers]


def steps(comm, foresee, *, peers=None, checkpointed=False, layers=LAYERS, num_steps=3, **options):
    """Return outputs and gradients of some steps, and the replicas that were sent."""
    options = {"in_flight": 2, "config": BALANCE, "experts": EXPERTS} | options
    plane = {"communicator": comm} if peers is None else {"peers": peers, "data_plane": "mapped"}
    if peers is not None:
        plane |= {"capacity": 4 * RANKS * TOKENS}
    balancer = Balancer(comm if peers is not None else None, **plane, **options)
    model, results = Model(balancer, checkpointed=checkpointed, layers=layers), []
    for seed in range(num_steps):
        routes = drawn_routes(balancer.rank, seed, layers=layers)
        if foresee:
            assert balancer.foresee(routes) == (seed > 0)  # the first step allocates
        results.append(model.step(routes, seed))
        assert sum(model.replicas()) > 0
    balancer.check()
    stats = balancer.stats()
    balancer.close() if peers is not None else None
    return results, stats["weights_copies_sent"], stats["microbatches"]


def assert_equal_steps(actual, expected):
    for own, other in zip(actual, expected, strict=True):
        for step, wanted in zip(own[0], other[0], strict=True):
            assert step.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert torch.equal(step[name], tensor), name


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gradients_are_the_same_bit_for_bit(transport):
    foreseen = everywhere(transport, RANKS, partial(steps, foresee=True))
    plain = everywhere(transport, RANKS, partial(steps, foresee=False))
    assert_equal_steps(foreseen, plain)
    assert [own[1:] for own in foreseen] == [own[1:] for own in plain]  # no replica is sent twice


@pytest.mark.parametrize("options", [{"checkpointed": True}, {"in_flight": 3}, {"slots": 2}])
def test_recompute_and_more_buffers(options):
    foreseen = LocalGroup(RANKS).run(partial(steps, foresee=True, **options))
    assert_equal_steps(foreseen, LocalGroup(RANKS).run(partial(steps, foresee=False, **options)))


def on_mapped(_rank, group, foresee, options):
    return steps(group, foresee, peers=SharedPeers(group), **options)


@pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
@pytest.mark.parametrize(
    "options",
    [
        {"layers": 2, "num_steps": 2},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"checkpointed": True}, marks=pytest.mark.slow),
    ],
)
def test_gradients_on_the_mapped_plane(options):
    foreseen, plain = (
        shared_pool().run(RANKS, on_mapped, foresee, options) for foresee in (True, False)
    )
    assert_equal_steps(foreseen, plain)


def test_replicas_travel_before_their_layer_begins(monkeypatch):
    sent, begin = [], MessageReplicas._fill

    def noted(self, loan, *, ahead):
        begin(self, loan, ahead=ahead)
        sent.append((self._shared.comm.rank, self.info.layer, backward_pass() != NO_PASS, ahead))

    def work(comm):
        model = foreseeing(comm)
        del sent[:]
        comm.all_gather(torch.zeros(1))
        routes = drawn_routes(comm.rank, 1)
        assert model.balancer.foresee(routes)
        model.step(routes)

    monkeypatch.setattr(MessageReplicas, "_fill", noted)
    LocalGroup(RANKS).run(work)
    forward = [(layer, False, True) for layer in range(LAYERS)]
    # The last layer cannot know that backward begins.
    backward = [(layer, True, layer < LAYERS - 1) for layer in reversed(range(LAYERS))]
    for rank in range(RANKS):
        assert [each[1:] for each in sent if each[0] == rank] == forward + backward


def foreseeing(comm, **options):
    """Return a model after its first step."""
    options = {"in_flight": 2, "config": BALANCE, "experts": EXPERTS} | options
    model = Model(Balancer(communicator=comm, **options))
    model.step(drawn_routes(comm.rank, 0))
    return model


def test_routes_saved_by_the_first_forward_pass_of_a_recompute():
    def work(comm):
        results = []
        for foresee in (False, True):
            model = foreseeing(comm)
            model.checkpointed = True
            routes = drawn_routes(comm.rank, 1)
            y = model.forward(routes)
            if foresee:
                assert model.balancer.foresee(routes, recompute=True)
            y.square().sum().backward()
            results.append(model.gradients())
        assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])

    LocalGroup(RANKS).run(work)


def test_a_promise_and_a_forward_pass_without_backward():
    def work(comm, foresee):
        model = foreseeing(comm, in_flight=LAYERS)
        results = []
        with model.balancer.unchanged_weights(), torch.no_grad():
            for _ in range(3):
                routes = drawn_routes(comm.rank, 1)
                if foresee:
                    assert model.balancer.foresee(routes)
                results.append(model.forward(routes))
        return results, model.balancer.stats()["weights_copies_sent"]

    for own, wanted in zip(
        *(LocalGroup(RANKS).run(partial(work, foresee=f)) for f in (True, False)), strict=True
    ):
        assert own[1] == wanted[1]
        assert all(map(torch.equal, own[0], wanted[0]))


def test_two_foreseen_steps_wait_for_backward():
    def work(comm, foresee):
        model = foreseeing(comm, in_flight=3)
        model.checkpointed = foresee == "checkpointed"
        outputs = []
        for seed in (1, 2):
            routes = drawn_routes(comm.rank, seed)
            assert not foresee or model.balancer.foresee(routes)
            outputs.append(model.forward(routes))
            ids = [layer.router.ids for layer in model.layers]
            assert all(map(torch.equal, ids, routes))
        # Recomputed layers ask their router again.
        outputs[1].square().sum().backward()
        if not model.checkpointed:
            outputs[0].square().sum().backward()
        return [p.grad.clone() for layer in model.layers for p in layer.parameters()]

    plain = LocalGroup(RANKS).run(partial(work, foresee=False))
    for own, wanted in zip(LocalGroup(RANKS).run(partial(work, foresee=True)), plain, strict=True):
        assert all(map(torch.equal, own, wanted))
    LocalGroup(RANKS).run(partial(work, foresee="checkpointed"))


# Wrong use.


def other_ids(comm):
    model = foreseeing(comm)
    routes = drawn_routes(comm.rank, 1)
    assert model.balancer.foresee(routes)
    if comm.rank == 1:
        routes[2] = (routes[2] + 1) % EXPERTS
    with pytest.raises(LoadError, match=r"ids of layer 2 on ranks \[1\] are not the foreseen ones"):
        model.step(routes)
    model.balancer.foresee(None)
    model.step(routes)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_other_ids_than_foreseen_are_refused_on_all_ranks(transport):
    everywhere(transport, RANKS, other_ids)


def other_ids_on_mapped(_rank, group):
    options = {"in_flight": 2, "config": BALANCE, "capacity": 4 * RANKS * TOKENS}
    peers = SharedPeers(group)
    balancer = Balancer(group, peers=peers, data_plane="mapped", experts=EXPERTS, **options)
    model, routes = Model(balancer), drawn_routes(balancer.rank, 1)
    model.step(drawn_routes(balancer.rank, 0))
    assert balancer.foresee(routes)
    if balancer.rank == 1:
        routes[2] = (routes[2] + 1) % EXPERTS
    with pytest.raises(LoadError, match=r"ids of layer 2 on ranks \[1\] are not the foreseen ones"):
        model.step(routes)
    balancer.close()


@pytest.mark.slow
@pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
def test_other_ids_than_foreseen_on_the_mapped_plane():
    shared_pool().run(RANKS, other_ids_on_mapped)


BAD_ROUTES = {
    "fewer": (lambda routes: routes[1:], r"all 4 layers, got 3"),
    "one dimension": (lambda routes: [*routes[1:], routes[0][:, 0]], r"layer 3 must be integers"),
    "floats": (lambda routes: [routes[0].float(), *routes[1:]], r"layer 0 must be .* got torch.fl"),
    "shorter": (lambda routes: [*routes[1:], routes[0][1:]], r"layer 3 are \[23, 2\] .*\[24, 2\]"),
    "range": (lambda routes: [*routes[1:], routes[0] + 5], r"ids must lie in 0\.\.5"),
    "text": (lambda _: "abcd", r"layer 0 must be integers \[tokens, K\], got <class 'str'>"),
}


def bad_on_one_rank(comm, name):
    model = foreseeing(comm)
    damage, message = BAD_ROUTES[name]
    routes = drawn_routes(comm.rank, 1)
    error = pytest.raises(CommunicationError, match=r"ranks \[0\] refused their input")
    if comm.rank == 0:
        routes, error = damage(routes), pytest.raises(LoadError, match=message)
    with error as caught:
        model.balancer.foresee(routes)
    assert "\n" not in str(caught.value)
    model.step(drawn_routes(comm.rank, 2))  # without foresight


@pytest.mark.parametrize("name", BAD_ROUTES)
def test_bad_routes_of_one_rank_are_refused_on_all_ranks(name):
    everywhere("local", RANKS, partial(bad_on_one_rank, name=name))


def test_a_step_that_is_not_finished_is_refused_or_dropped():
    def work(comm):
        model = foreseeing(comm)
        routes = drawn_routes(comm.rank, 1)
        assert model.balancer.foresee(routes)
        model.layers[0].router.ids = routes[0]
        model.layers[0](torch.zeros(TOKENS, HIDDEN, dtype=torch.float64))
        with pytest.raises(ConfigError, match=r"layers \[1, 2, 3\] of the foreseen .* foresee\(No"):
            model.balancer.foresee(routes)
        model.balancer.foresee(None)
        assert model.balancer.foresee(routes)
        model.step(routes)

    LocalGroup(RANKS).run(work)


def test_settings_and_calls_that_cannot_be_foreseen():
    def work(comm):
        with pytest.raises(ConfigError, match=r"second buffer .* in_flight=1: pass in_flight=2"):
            Balancer(communicator=comm, experts=EXPERTS).foresee([])
        model = foreseeing(comm)
        routes = drawn_routes(comm.rank, 1)
        assert model.balancer.foresee(routes)
        model.layers[0].router.ids = routes[0]
        x = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
        with pytest.raises(ConfigError, match=r"foreseen with policy 'ultraep', not with 'none'"):
            model.layers[0](x, policy="none")
        comm.all_gather(torch.zeros(1))
        torch.optim.SGD(model.layers[0].parameters(), lr=0.0).step()
        comm.all_gather(torch.zeros(1))  # threads count the steps of all ranks
        with pytest.raises(ConfigError, match=r"call foresee\(\) after optimizer.step\(\)"):
            model.layers[0](x)
        comm.all_gather(torch.zeros(1))
        model.balancer.foresee(None)

    LocalGroup(RANKS).run(work)


@pytest.mark.filterwarnings("ignore::ultraep.NothingToBalance")
def test_without_slots_or_a_second_rank_nothing_is_planned_ahead():
    def work(comm):
        model = foreseeing(comm, slots=0)
        assert not model.balancer.foresee(drawn_routes(comm.rank, 1))

    LocalGroup(1).run(work)
    LocalGroup(2).run(work)


@pytest.mark.parametrize("promise", [False, True])
def test_fp8_experts_and_a_trace(promise, tmp_path):
    """FP8 weights are quantised when replicas leave; a trace has the same plans and transfers."""

    def work(comm, foresee):
        folder = tmp_path / str(foresee)
        options = {"in_flight": 2, "config": BALANCE, "record": folder}
        balancer = Balancer(communicator=comm, experts=EXPERTS, **options)
        layers = [
            BalancedMoE.swiglu(32, 64, EXPERTS, 2, balancer=balancer, quantised=FORMAT, seed=seed)
            for seed in range(2)
        ]
        for layer in layers:
            layer.router = Given()
        results = []
        for seed in range(3):
            routes = drawn_routes(comm.rank, seed, layers=2)
            x = torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(seed))
            with balancer.unchanged_weights() if promise else nullcontext():
                assert not foresee or balancer.foresee(routes) == (seed > 0)
                for layer, ids in zip(layers, routes, strict=True):
                    layer.router.ids = ids
                    x = x + layer(x)
                x.square().sum().backward()
            for layer in layers:
                for parameter in layer.parameters():
                    results.append(parameter.grad.clone())
                    parameter.data += 0.01 * parameter.grad.sign()
                    parameter.grad = None
        balancer.close()
        return results

    foreseen, plain = (LocalGroup(RANKS).run(partial(work, foresee=f)) for f in (True, False))
    for own, wanted in zip(foreseen, plain, strict=True):
        assert all(map(torch.equal, own, wanted))
    own, wanted = (read_trace(tmp_path / str(foresee)) for foresee in (True, False))
    assert own.copies.tolist() == wanted.copies.tolist() != []
    assert own.bytes_moved.tolist() == wanted.bytes_moved.tolist()
