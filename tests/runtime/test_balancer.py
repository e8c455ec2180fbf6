"""Ranks agree, or every rank raises an error that names the ranks that differ."""

import contextlib
import re
import threading
from itertools import product

import pytest
import torch
from cases import skewed_ids
from dense import Example
from microbatches import counted, planned
from ranks import TIMED_OUT

import ultraep
from ultraep import (
    BalanceConfig,
    Balancer,
    CommunicationError,
    ConfigError,
    LoadError,
    LocalGroup,
    PlanMismatch,
    Rates,
    Topology,
    policies,
)
from ultraep.backends.triton.device import default_device
from ultraep.microbatch import Layer
from ultraep.runtime import connect as connect_module
from ultraep.runtime.connect import connect
from ultraep.runtime.stats import StatsByPolicy
from ultraep.trace.schema import BACKWARD, FORWARD
from ultraep.workload import Load
from ultraep_tools.baselines import BASELINES

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = default_device()  # of kernels


def outcomes(size, work):
    """Return the result or error of every rank; check that no rank waited for its timeout."""
    results = [None] * size

    def on_rank(comm):
        try:
            results[comm.rank] = work(comm)
        except Exception as error:
            results[comm.rank] = error
            raise

    with contextlib.suppress(Exception):
        LocalGroup(size).run(on_rank)
    assert not any(TIMED_OUT.search(str(result)) for result in results)
    return results


INVALID_IDS = {
    "too large": (torch.tensor([[0], [8]]), r"ids must lie in 0\.\.7"),
    "negative": (torch.tensor([[-2], [3]]), r"ids must lie in 0\.\.7"),
    "floats": (torch.tensor([[0.0]]), r"ids must be integers, got (torch\.)?float32"),
    "bools": (torch.tensor([[True]]), r"ids must be integers, got (torch\.)?bool"),
}


@pytest.mark.parametrize(
    ("kind", "bad_ranks", "kernels"),
    [
        *product(INVALID_IDS, ([2], [0, 3]), [None]),
        *product(("too large", "floats"), [[0, 3]], [True]),
    ],
    ids=str,
)
def test_invalid_ids_are_an_error_on_every_rank_and_all_go_on(kind, bad_ranks, kernels):
    bad, message = INVALID_IDS[kind]

    def work(comm):
        balancer = Balancer._with_settings(comm, experts=8, kernels=kernels, data_plane="messages")
        good = skewed_ids(comm.rank).to(DEVICE if kernels else "cpu")
        with pytest.raises((LoadError, CommunicationError)) as caught:
            counted(balancer, bad.to(good.device) if comm.rank in bad_ranks else good)
        return caught, balancer.begin(Layer(), good).count().sum()

    results = LocalGroup(4).run(work)
    assert [total for _, total in results] == [160] * 4
    for rank, (caught, _) in enumerate(results):
        refused = rank in bad_ranks
        assert caught.type is (LoadError if refused else CommunicationError)
        assert caught.match(message if refused else re.escape(f"ranks {bad_ranks} refused"))


def test_an_input_of_the_wrong_width_on_one_rank_stops_the_others():
    example = Example([20] * 3, experts=9)

    def work(comm):
        layer = example.layer(Balancer(comm, experts=9))
        return layer(example.inputs[comm.rank][:, : 16 - (comm.rank == 1)])

    first, second, third = outcomes(3, work)
    assert isinstance(second, LoadError)
    for error in (first, third):
        assert isinstance(error, CommunicationError)
        assert "rank 1" in str(error) or "ranks [1]" in str(error)


@pytest.mark.parametrize(
    "other",
    [
        {"slots": 2},
        {"experts": 12},
        {"experts": [3, 3, 2, 2, 1, 1, 0, 0]},
        {"policy": "none"},
        {"config": BalanceConfig(tolerance=0.1)},
        {"config": BalanceConfig(locality=False)},
        {"config": BalanceConfig(speeds=(1000, 1000, 1000, 900))},
        {"config": BalanceConfig(speeds="auto")},
        {"relay": "direct"},
        {"relay": "chain"},
        {"in_flight": 2},
        {"data_plane": "messages"},
    ],
    ids=str,
)
def test_settings_that_differ_are_an_error_on_every_rank(other):
    def work(comm):
        options = {"experts": 8, **(other if comm.rank == 2 else {})}
        with pytest.raises(PlanMismatch, match=r"ranks disagree about the settings") as caught:
            Balancer._with_settings(comm, **options)
        return str(caught.value)

    results = LocalGroup(4).run(work)
    assert len(set(results)) == 1
    assert "ranks [0, 1, 3] have" in results[0]
    assert "ranks [2] have" in results[0]


def test_the_backend_may_differ():
    def work(comm):
        names = ultraep.backend_names()
        balancer = Balancer._with_settings(comm, experts=8, backend=names[comm.rank % len(names)])
        return planned(balancer, skewed_ids(comm.rank))[1].digest()

    assert len(set(LocalGroup(2).run(work))) == 1


@pytest.mark.parametrize("place", ["before", "router", "experts", "between", "backward"])
def test_a_rank_that_fails_stops_the_others_quickly(place):
    example = Example([20] * 4)

    def fail(*_):
        raise ZeroDivisionError(place)

    def work(comm):
        layer = example.layer(Balancer(comm, experts=8))
        x = example.inputs[comm.rank].clone().requires_grad_()
        layer(x).sum().backward()
        broken = comm.rank == 3
        if broken and place == "before":
            fail()
        if broken and place in ("router", "experts"):
            getattr(layer, place).forward = fail
        y = layer(x)
        if broken and place == "between":
            fail()
        if broken and place == "backward":
            y.register_hook(fail)
        y.sum().backward()
        layer(x)

    *others, last = outcomes(4, work)
    assert isinstance(last, ZeroDivisionError)
    for error in others:
        assert isinstance(error, CommunicationError)
        assert "rank 3 failed" in str(error)


def test_no_rank_waits_for_one_whose_work_has_ended():
    def work(comm):
        balancer = Balancer(comm, experts=9)
        counted(balancer, skewed_ids(comm.rank))
        if comm.rank != 1:
            counted(balancer, skewed_ids(comm.rank))

    message = r"at the loads of layer 0 \(step 1\): rank . waits for rank 1, which has ended"
    with pytest.raises(CommunicationError, match=message):
        LocalGroup(3).run(work)


COUNTED = "microbatches imbalance_before imbalance_after imbalance_worst copies priced left_alone "
COUNTED += "short_of_slots "
COUNTED += "planned_seconds planned_seconds_without_replicas remote_share timed pool_bytes "
COUNTED += "weights_bytes_sent weights_copies_sent gradients_bytes_sent gradients_copies_sent"


def test_stats():
    example = Example([30] * 4)
    nbytes = (2 * 12 * 16 + 16 * 12) * 8

    def work(comm):
        balancer = Balancer(comm, experts=8)
        layer = example.layer(balancer)
        empty = balancer.stats()
        x = example.inputs[comm.rank].clone().requires_grad_()
        for _ in range(3):
            layer(x).backward(example.gradients[comm.rank])
        stats = balancer.stats()
        layer(x, policy="none")
        both = balancer.stats()
        balancer.reset_stats()
        return empty, stats, both, balancer.stats(), layer

    results = LocalGroup(4).run(work)
    empty, stats, both, reset, *_ = results[0]
    plan_none = results[0][4].last_plan
    nested = {"seconds": {}, "rates": {}, "speeds": (), "measured_speeds": ()}
    assert empty == dict.fromkeys(COUNTED.split(), 0) | nested
    assert reset | {"pool_bytes": 0} == empty
    plan = ultraep.plan(plan_none.loads, plan_none.topology)
    assert stats["microbatches"] == stats["timed"] == 3
    assert stats["imbalance_before"] == pytest.approx(plan.initial_imbalance)
    assert stats["imbalance_after"] == pytest.approx(plan.imbalance)
    assert stats["imbalance_worst"] == plan.imbalance
    assert stats["copies"] == 3 * plan.num_replicas > 0
    assert stats["remote_share"] == pytest.approx(plan.remote_tokens / plan.total)
    for name, times in (("weights", 3), ("gradients", 3)):  # weights stay for backward
        sent = [rank[1][f"{name}_bytes_sent"] for rank in results]
        assert sum(sent) == times * plan.num_replicas * nbytes, name
        copies = [rank[1][f"{name}_copies_sent"] for rank in results]
        assert sum(copies) == times * plan.num_replicas, name
    assert stats["seconds"].keys() == {*FORWARD, *BACKWARD} - {"recompute"}
    assert all(seconds > 0 for seconds in stats["seconds"].values())
    assert stats["pool_bytes"] == results[0][4].balancer.plane("cpu").nbytes >= nbytes
    assert both["microbatches"] == 4
    assert both["imbalance_worst"] == plan.initial_imbalance
    assert both["copies"] == stats["copies"]


def summaries(comm):
    example, result = Example([30] * 2, experts=4), []
    balancer = Balancer(comm, experts=4, config=BalanceConfig(rates=Rates(row=1000)))
    layer, x = example.layer(balancer), example.inputs[comm.rank].clone().requires_grad_()
    result.append(balancer.summary())
    layer(x).backward(example.gradients[comm.rank])
    result.append(balancer.summary())
    layer(x, policy="none")
    result.append(balancer.summary())
    balancer.config = BalanceConfig(policy="none")
    result.append(balancer.summary())
    balancer.reset_stats()
    balancer.config = BalanceConfig(rates=Rates(row=1, copy=10**9))  # replicas never pay
    layer(x)
    return [*result, balancer.summary()], balancer.stats(), layer.last_plan


def test_summary():
    texts, stats, alone = LocalGroup(2).run(summaries)[0]
    empty, balanced, beside, none, expensive = texts
    assert empty == "no microbatch was planned by policy 'ultraep' yet"
    before = alone.initial_imbalance
    plan = ultraep.plan(alone.loads, alone.topology)
    assert plan.num_replicas == 1
    change = f"imbalance {before:.2f} -> {plan.imbalance:.2f}, mean of 1 microbatch of policy "
    imbalance, replicas, time = balanced.splitlines()
    assert imbalance == f"{change}'ultraep'"
    assert replicas.startswith("1.0 replicas per microbatch; this rank sent ")
    assert time.startswith("predicted time of experts and replicas: ")
    assert beside.splitlines() == [f"{change}'ultraep' (1 of another)", *(replicas, time)]
    assert none.splitlines()[0].startswith(f"imbalance {before:.2f}, mean of 1 microbatch of ")
    assert none.splitlines()[1] == "0 replicas"
    assert expensive.splitlines()[:2] == [
        f"imbalance {before:.2f}, mean of 1 microbatch of policy 'ultraep'",
        "0 replicas: none would have saved time",
    ]
    assert expensive.splitlines()[2].startswith("this rank spent ")
    assert stats["left_alone"] == 1


@pytest.mark.parametrize(("slots", "after"), [(1, 1.60), (2, 1.0), (3, 1.0)])
def test_the_summary_says_that_more_slots_would_help(slots, after):
    loads = Load("hot rank", 2.87).draw(8, 128, tokens=4096)  # evenly over 16 experts
    plan = ultraep.plan(loads, Topology(ranks=8, experts=128, slots=slots))
    assert plan.imbalance == pytest.approx(after, abs=0.005)
    assert plan.short_of_slots == (slots == 1)
    stats = StatsByPolicy()
    stats._stats["ultraep"].add_plan(plan)
    lines = stats.summary("ultraep").splitlines()
    text = "more slots would help 1 microbatch: no free slot was left"
    assert lines[3:] == ([text] if slots == 1 else [])


WRONG = {
    "policy": ({"policy": "fair"}, "unknown policy 'fair'; choose from none, ultraep"),
    "config": ({"config": BalanceConfig(policy="fair")}, "unknown policy 'fair'"),
    "both": ({"config": BalanceConfig(), "policy": "none"}, "config or policy, not both"),
    "relay": ({"relay": "ring"}, "relay must be one of direct, chain, auto, got 'ring'"),
    "in_flight": ({"in_flight": 0}, "in_flight must be an integer of at least 1, got 0"),
    "backend": ({"backend": "gpu"}, "unknown backend 'gpu'"),
    "experts per rank": ({"experts": 7}, "7 experts do not divide evenly over 2 ranks"),
    "homes": ({"experts": [0, 2]}, r"homes must lie in 0\.\.1, got 0\.\.2"),
    "data plane": (
        {"data_plane": "air"},
        "data_plane must be one of auto, mapped, hybrid, messages, got 'air'",
    ),
    "capacity": ({"capacity": 0}, "'auto', must be an integer of at least 1, got 0"),
    "word for a capacity": (
        {"capacity": "most"},
        "capacity, unless it is 'auto', must be",
    ),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_invalid_settings_leave_no_connection(options, message, monkeypatch):
    class Group:
        rank, size, open = 0, 2, True

        def gather_objects(self, value):
            return [value] * self.size

        def close(self):
            self.open = False

    def connect(*_, **__):
        connected.append(Group())
        return connected[-1]

    connected = []
    monkeypatch.setattr(connect_module, "connect", connect)
    with pytest.raises(ConfigError, match=message):
        Balancer._with_settings("alone", **{"experts": 7, **options})
    assert not any(group.open for group in connected)


def test_ranks_that_disagree_leave_no_connection(monkeypatch):
    closed = []

    def work(comm):
        comm.close = lambda: closed.append(comm.rank)
        here.comm = comm
        with pytest.raises(PlanMismatch):
            Balancer("alone", experts=8, slots=comm.rank)

    here = threading.local()
    monkeypatch.setattr(connect_module, "connect", lambda *_, **__: here.comm)
    LocalGroup(2).run(work)
    assert sorted(closed) == [0, 1]


def test_an_unknown_policy_for_one_call():
    balancer = Balancer("alone", experts=8)
    with pytest.raises(ConfigError, match="unknown policy 'fair'"):
        planned(balancer, skewed_ids(0), policy="fair")
    for policy, expected in (("none", "none"), (None, "ultraep")):
        assert planned(balancer, skewed_ids(0), policy=policy)[1].config.policy == expected


def test_the_balancer_uses_and_closes_a_communicator():
    comm = connect(None)
    closed = []
    comm.close = lambda: closed.append(1)
    balancer = Balancer(comm, experts=8)
    assert balancer.comm is comm
    assert balancer.rank == 0
    assert balancer.topology.ranks == 1
    balancer.close()
    assert closed == [1]


def test_one_variable_switches_balancing_off(monkeypatch):
    monkeypatch.setenv("ULTRAEP_POLICY", "none")
    assert Balancer("alone", experts=8).config.policy == "none"
    monkeypatch.setenv("ULTRAEP_POLICY", "mine")
    with pytest.raises(ConfigError, match="unknown policy 'mine'"):
        Balancer("alone", experts=8)


@pytest.mark.parametrize("name", [*BASELINES, "dated", "boundless"])
def test_offline_policies_are_refused(name, monkeypatch):
    monkeypatch.setattr(policies, "_registry", dict(policies._registry))
    ultraep.register_policy("dated", needs_history=True)(lambda _: None)
    ultraep.register_policy("boundless", within_limits=False)(lambda _: None)
    balancer = Balancer("alone", experts=8)
    for run in (
        lambda: Balancer("alone", experts=8, policy=name),
        lambda: counted(balancer, skewed_ids(0), policy=name),
    ):
        with pytest.raises(ConfigError, match=f"{name}.* offline .*takes ultraep, none or a pol"):
            run()
