"""on_error="unbalanced": a failure on one rank runs that microbatch unbalanced on all ranks."""

import logging
import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from dense import Example, Result, assert_same, dense, gradients_of
from ranks import PATIENCE, shared_pool
from shared_peers import SharedPeers
from torch.utils.checkpoint import checkpoint

from ultraep import (
    BalanceConfig,
    Balancer,
    CommunicationError,
    ConfigError,
    LoadError,
    LocalGroup,
    PlanMismatch,
    Topology,
    read_trace,
)
from ultraep.backends.triton.device import interpreted
from ultraep.metrics import Metrics
from ultraep.runtime.mapped import plane as mapped_plane
from ultraep.runtime.messages import plane as messages_plane
from ultraep.runtime.recording import Recording
from ultraep.runtime.speeds import Speeds

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLE = Example([24, 24, 24, 24])
failing = threading.local()  # `now`: whether this rank fails


def fail_if_told(function, error=RuntimeError):
    def flaky(*args, **kwargs):
        if getattr(failing, "now", False):
            raise error("on purpose")
        return function(*args, **kwargs)

    return flaky


@pytest.fixture(autouse=True)
def planner_that_fails():
    with patched_planner():
        yield


@contextmanager
def patched_planner():
    with pytest.MonkeyPatch.context() as patch:
        for plane in (messages_plane, mapped_plane):
            patch.setattr(plane, "make_plan", fail_if_told(plane.make_plan))
        yield


def steps(balancer, example, *, fails_in=(1,), rank=1, number=3, run=None):
    """Run steps; the planner of one rank fails in some of them. Return a result for each step."""
    layer, own = example.layer(balancer), balancer.rank
    results = []
    for step in range(number):
        layer.zero_grad()
        x = example.inputs[own].clone().requires_grad_()
        failing.now = step in fails_in and own == rank
        y = layer(x) if run is None else run(layer, x)
        failing.now = False
        y.backward(example.gradients[own])
        plan = layer.last_plan.to_host()
        results.append(Result(y.detach(), gradients_of(layer, x), plan, balancer.stats()))
    return results


def assert_unbalanced_together(of_ranks, example, fails_in=(1,), topology=None):
    """Check all steps of all ranks: dense results, replicas except in some steps, equal counts."""
    topology = topology or Topology(ranks=example.ranks, experts=example.experts)
    for step, results in enumerate(zip(*of_ranks, strict=True)):
        assert_same(list(results), dense(example), topology)
        replicas = {result.plan.num_replicas for result in results}
        assert len(replicas) == 1
        assert (replicas == {0}) == (step in fails_in), step
        failed = sum(other <= step for other in fails_in)
        assert {result.stats["failed"] for result in results} == {failed}
        assert {result.stats["microbatches"] for result in results} == {step + 1}


def in_process(body, example=EXAMPLE, **options):
    def work(comm):
        options_of = {"on_error": "unbalanced", "data_plane": "messages"} | options
        return body(Balancer(experts=example.experts, communicator=comm, **options_of), example)

    return LocalGroup(example.ranks, timeout=PATIENCE).run(work)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"backend": "triton"}, marks=pytest.mark.slow),  # planned by kernels
        {"data_plane": "hybrid", "domain": 2},
        {"in_flight": 2, "relay": "chain"},
    ],
    ids=["messages", "kernels", "hybrid", "chain"],
)
def test_ranks_of_one_process(options, monkeypatch):
    if options.get("backend") == "triton":
        if not interpreted():
            pytest.skip("kernels are interpreted")
        plan = messages_plane.MessagesMicrobatch._plan_of_device
        own = lambda self, *args: fail_if_told(plan)(self, *args)  # noqa: E731
        monkeypatch.setattr(messages_plane.MessagesMicrobatch, "_plan_of_device", own)
    results = in_process(partial(steps, fails_in=(1, 3), number=5), **options)
    domain = {"domain": options["domain"]} if "domain" in options else {}
    topology = Topology(ranks=EXAMPLE.ranks, experts=EXAMPLE.experts, **domain)
    assert_unbalanced_together(results, EXAMPLE, (1, 3), topology)


def test_plans_beyond_the_limits_are_failures():
    results = in_process(partial(steps, fails_in=()), policy="eplb")  # needs more slots
    assert_unbalanced_together(results, EXAMPLE, (0, 1, 2))


def on_process(rank, group, transport, options):
    example = Example([24, 24])
    with patched_planner():
        settings = {"on_error": "unbalanced", "timeout": PATIENCE} | options
        if options.get("data_plane") == "mapped":
            settings |= {"peers": SharedPeers(group), "capacity": 2 * 24 * example.top_k}
        balancer = Balancer(group, experts=example.experts, transport=transport, **settings)
        actual = steps(balancer, example)
        balancer.close()
        return actual


@pytest.mark.parametrize("transport", ["shared", "sockets"])
def test_processes(transport):
    results = shared_pool().run(2, on_process, transport, {"data_plane": "messages"})
    assert_unbalanced_together(results, Example([24, 24]))


@pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
def test_mapped_memory_with_plans_of_the_host():
    options = {"data_plane": "mapped", "policy": "quota"}
    results = shared_pool().run(2, on_process, "auto", options)
    assert_unbalanced_together(results, Example([24, 24]))


def test_the_default_raises_as_before():
    with pytest.raises(RuntimeError, match="on purpose"):
        in_process(steps, on_error="raise")


def test_errors_of_communication_stop_the_job(monkeypatch):
    broken = fail_if_told(messages_plane.make_plan, CommunicationError)
    monkeypatch.setattr(messages_plane, "make_plan", broken)
    with pytest.raises(CommunicationError, match="on purpose"):
        in_process(steps)


def test_wrong_settings():
    with pytest.raises(ConfigError, match="on_error must be one of raise, unbalanced, got 'x'"):
        Balancer("alone", experts=4, on_error="x")
    with pytest.raises(ConfigError, match="on_error='unbalanced' needs verify=True, got verify=F"):
        Balancer("alone", experts=4, on_error="unbalanced", verify=False)


def test_a_single_rank():
    example = Example([24])
    results = in_process(partial(steps, rank=0), example)
    assert [result.stats["failed"] for result in results[0]] == [0, 1, 1]


def test_it_is_logged_once_and_counted_in_metrics(caplog):
    def body(balancer, example):
        metrics = Metrics(balancer, every=1)
        readings = []
        metrics.tell(readings.append)
        layer = example.layer(balancer)
        for step in range(4):
            failing.now = balancer.rank == 1 and step in (1, 2)
            layer(example.inputs[balancer.rank])
            failing.now = False
            metrics.step()
        balancer.reset_stats()
        return readings[-1].totals.failed, balancer.stats()["failed"]

    with caplog.at_level(logging.ERROR, "ultraep.runtime.failsafe"):
        assert in_process(body) == [(2, 0)] * EXAMPLE.ranks
    lines = [r.getMessage() for r in caplog.records if r.name == "ultraep.runtime.failsafe"]
    assert sorted(lines) == [
        *["layer 0 (step 2) runs unbalanced, because of an error on ranks [1]"] * 3,
        "rank 1 failed: layer 0 (step 2) runs unbalanced",
    ]


def test_a_static_capacity_still_holds():
    with pytest.raises(LoadError, match="capacity='static' allows only the mean"):
        in_process(steps, capacity="static", slots=2)


# -- recomputed passes ---------------------------------------------------------------------------


def recompute(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def test_backward_repeats_an_unbalanced_forward_pass():
    results = in_process(partial(steps, run=recompute))
    for step, of_ranks in enumerate(zip(*results, strict=True)):
        assert_same(list(of_ranks), dense(EXAMPLE), Topology(ranks=4, experts=EXAMPLE.experts))
        assert {result.plan.num_replicas == 0 for result in of_ranks} == {step == 1}
        assert {result.stats["failed"] for result in of_ranks} == {int(step > 0)}


def test_a_failure_in_a_recomputed_pass_raises_on_all_ranks():
    errors = {}

    def body(balancer, example):
        layer, x = example.layer(balancer), example.inputs[balancer.rank]
        y = checkpoint(layer, x.clone().requires_grad_(), use_reentrant=False)
        failing.now = balancer.rank == 1
        try:
            y.sum().backward()
        except (RuntimeError, PlanMismatch) as error:
            errors[balancer.rank] = str(error)

    in_process(body)
    assert errors.pop(1) == "on purpose"
    assert len(errors) == EXAMPLE.ranks - 1
    for text in errors.values():
        assert text.startswith("ranks [1] failed at stage 'plan' of layer 0 (step 2)")


# -- rates, speeds, traces -----------------------------------------------------------------------


def test_a_network_that_cannot_be_measured(monkeypatch):
    monkeypatch.delenv("ULTRAEP_RATES")

    def body(balancer, example):
        layer = example.layer(balancer)
        forward = layer.experts.forward
        if balancer.rank == 1:

            def only_real_rows(arrivals, *args, **kwargs):
                if hasattr(arrivals.exchange, "info"):
                    return forward(arrivals, *args, **kwargs)
                raise ValueError("synthetic rows")

            layer.experts.forward = only_real_rows
        replicas = []
        for _ in range(2):
            layer(example.inputs[balancer.rank])
            replicas.append(layer.last_plan.num_replicas)
        return replicas, balancer.stats()["failed"]

    results = in_process(body, config=BalanceConfig())
    assert len(set(map(str, results))) == 1
    (first, second), failed = results[0]
    assert (first, failed) == (0, 1)
    assert second > 0  # planned for balance, without rates


def test_all_ranks_raise_if_one_cannot_be_measured(monkeypatch):
    monkeypatch.delenv("ULTRAEP_RATES")
    errors = {}

    def body(balancer, example):
        layer = example.layer(balancer)
        if balancer.rank == 1:
            layer.experts.forward = fail_if_told(layer.experts.forward, ValueError)
            failing.now = True
        try:
            layer(example.inputs[balancer.rank])
        except ValueError as error:  # a ConfigError is one, too
            errors[balancer.rank] = str(error)

    in_process(body, config=BalanceConfig(), on_error="raise")
    assert errors.pop(1) == "on purpose"
    for text in errors.values():
        assert text.startswith("rates cannot be measured, rank 1 raised ValueError: on purpose")


def test_a_recorder_that_fails_ends_the_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(Recording, "took", fail_if_told(Recording.took))
    results = in_process(steps, record=tmp_path / "run")
    for of_ranks in zip(*results, strict=True):
        assert_same(list(of_ranks), dense(EXAMPLE), Topology(ranks=4, experts=EXAMPLE.experts))
        assert len({result.plan.num_replicas for result in of_ranks}) == 1
    assert {of_rank[-1].stats["failed"] for of_rank in results} == {1}
    assert len(read_trace(tmp_path / "run")) < 3


@pytest.mark.parametrize("verb", ["report", "gathered"])
def test_speeds_that_cannot_be_learnt(verb, monkeypatch):
    monkeypatch.setattr(Speeds, verb, fail_if_told(getattr(Speeds, verb)))
    config = BalanceConfig(objective="balance", speeds="auto")
    results = in_process(steps, config=config)
    assert_unbalanced_together(results, EXAMPLE)


def test_foreseen_layers_plan_themselves():
    def body(balancer, example):
        layer, x = example.layer(balancer), example.inputs[balancer.rank]
        y, routing = layer(x, with_routing=True)
        failing.now = balancer.rank == 1
        foreseen = balancer.foresee(routing.ids[None])
        failing.now = False
        again = layer(x)
        assert torch.equal(y, again)
        return foreseen, layer.last_plan.num_replicas > 0, balancer.stats()["failed"]

    assert in_process(body, in_flight=2) == [(False, True, 1)] * EXAMPLE.ranks
