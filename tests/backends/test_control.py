"""The control plane on the GPU gives the plans and routes of the host, and counts faults.

Without a GPU, its kernels are interpreted.
"""

import signal

import numpy as np
import pytest
import torch
from cases import NAMED, draw_ids, plan_of, skewed_ids, with_padding
from guard import watched
from microbatches import counted
from test_triton import DEVICE, assert_same_routes, control_of, on_device

import ultraep
from ultraep import BalanceConfig, Balancer, ConfigError, LoadError, Rates, Topology
from ultraep.backends.triton.device import interpreted
from ultraep.backends.triton.planner import MAX_TILE
from ultraep.runtime.device_planner import DevicePlanner

TOPOLOGIES = {
    "one domain": Topology(ranks=4, experts=8),
    "two domains": Topology(ranks=6, experts=12, slots=2, domain=3),
    "uneven homes": Topology(ranks=3, experts=7, homes=[0, 0, 2, 2, 2, 2, 0]),
    "no slots": Topology(ranks=2, experts=6, slots=0),
    "one rank": Topology(ranks=1, experts=5),
}


FEW = Topology(ranks=4, experts=8)


def integers(*shape, dtype=torch.int64, device=DEVICE):
    return torch.zeros(shape, dtype=dtype, device=device)


def ids_of_ranks(topology, seed, top_k=2, padding=0.1):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 100, topology.ranks)
    ids = [draw_ids(rng, n, top_k, topology, 2.0) for n in tokens]
    return [with_padding(rng, own, padding) for own in ids]


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_steps_agree_with_the_host(topology):
    config = BalanceConfig(tolerance=0.05)
    controls = [control_of(topology, config, rows=200, rank=rank) for rank in range(topology.ranks)]
    for step in range(3):
        ids = ids_of_ranks(topology, seed=step)
        counts = [c.count(own.to(DEVICE)) for c, own in zip(controls, ids, strict=True)]
        loads, expected = torch.stack(counts), plan_of(ids, topology, config)
        for rank in {step % topology.ranks, topology.ranks - 1}:
            control, own = controls[rank], ids[rank]
            assert control.plan(loads).to_host().digest() == expected.digest()
            routes = control.reroute(own.to(DEVICE), counted=True)
            assert_same_routes(routes, own, expected, rank)
            control.check()


def test_to_host_can_reuse_loads_of_the_host():
    loads, topology = NAMED["uneven_homes"]
    plan = control_of(topology).plan(on_device(loads))
    assert plan.to_host(loads).loads is loads
    assert plan.to_host() == plan.to_host(loads) == ultraep.plan(loads, topology)


# Adopted plans


def test_an_adopted_plan_replaces_all_of_the_last_one():
    """In the same memory: graphs read the memory of the first plan."""
    topology = Topology(ranks=8, experts=8)
    ids = torch.zeros(60, 1, dtype=torch.int64)
    many, none = (
        plan_of([ids] * 8, topology, BalanceConfig(policy=name)) for name in ("ultraep", "none")
    )
    control = control_of(topology, rows=60)
    first = control.plan(on_device(many.loads))
    adopted = control.adopt(none)
    assert adopted.to_host() == first.to_host() == none
    assert (adopted.replicas == -1).all()
    assert (adopted.slot_of_replica == -1).all()
    assert not adopted.quotas.any()
    assert_same_routes(control.reroute(ids.to(DEVICE)), ids, none, 0)
    assert control.plan(on_device(many.loads)).to_host() == many
    assert_same_routes(control.reroute(ids.to(DEVICE)), ids, many, 0)


def test_plans_that_do_not_fit_are_not_adopted():
    topology = Topology(ranks=4, experts=8, slots=0)
    other = plan_of(ids_of_ranks(TOPOLOGIES["no slots"], seed=0), TOPOLOGIES["no slots"])
    with pytest.raises(ConfigError, match=r"2 ranks, 6 experts.* does not fit .*ranks=4.*"):
        control_of(topology).adopt(other)
    ideal = plan_of(ids_of_ranks(topology, seed=0), topology, BalanceConfig(policy="ideal"))
    with pytest.raises(ConfigError, match=r"Plan\(ideal, 4 ranks.* does not fit .*slots=0"):
        control_of(topology).adopt(ideal)


# Faults that the device counts


def invalid_ids(control):
    for _ in range(3):
        control.count(torch.tensor([[0, 8], [-2, -1]], device=DEVICE))


def invalid_loads(control):
    loads = torch.ones(4, 8, dtype=torch.int64)
    loads[1, 2] = loads[3, 3] = -1
    loads[:, 5] = 2**30
    control.plan(loads.to(DEVICE))


def loads_whose_sum_overflows(control):
    control.plan(torch.full((4, 8), 2**62, device=DEVICE))


def other_ids_than_counted(control):
    control.plan(integers(4, 8))
    control.count(integers(3, 1) + 1)
    control.reroute(integers(9, 1), counted=True)


def other_ids_than_planned(control):
    control.plan(torch.eye(4, 8, dtype=torch.int64, device=DEVICE))
    control.reroute(integers(2, 1) + 7)


def everything(control):
    control.plan(torch.full((4, 8), -1, device=DEVICE))
    control.reroute(torch.tensor([[9]], device=DEVICE))


FAULTS = {
    invalid_ids: r"on rank 1: 6 ids must lie in 0\.\.7 \(stage 'loads'\)$",
    invalid_loads: "3 loads are negative, or add up to more than 2147483647",
    loads_whose_sum_overflows: "32 loads are negative, or add up to more",
    other_ids_than_counted: "1 experts have another number of rows",
    other_ids_than_planned: "2 experts have another number of rows than in the plan",
    everything: r"rank 1: 1 ids .*; 32 loads .*; 8 experts ",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_add_up_and_are_raised_once(fault):
    control = control_of(FEW, rows=200, rank=1)
    fault(control)
    with pytest.raises(LoadError, match=FAULTS[fault]):
        control.check()
    assert control.faults.tolist() == [0, 0, 0]
    control.check()


# Invalid arguments

WRONG_SETTINGS = {
    "policy": (
        {"config": BalanceConfig(policy="quota")},
        "policy 'quota' cannot run on the GPU; choose from ultraep, none",
    ),
    "rank too large": ({"rank": 4}, r"rank must lie in 0\.\.3, got 4"),
    "negative rank": ({"rank": -1}, r"rank must lie in 0\.\.3, got -1"),
    "too many rows": (
        {"rows": 2**29},
        r"rows must lie in 0\.\.536870911, so that 4 ranks .* 2147483647, got 536870912",
    ),
    "negative rows": ({"rows": -1}, r"rows must lie in 0\.\.536870911, .*, got -1"),
    "device": ({"device": "meta"}, f"kernels run on {DEVICE.type}, not on meta"),
    "tile": (
        {"topology": Topology(ranks=1024, experts=65 * 1024)},
        f"1024 ranks with up to 65 home experts .* tile of 131072, .* planner holds {MAX_TILE}",
    ),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG_SETTINGS.values(), ids=WRONG_SETTINGS)
def test_invalid_settings(wrong, message):
    settings = {"topology": FEW, "rows": 10, "device": DEVICE, **wrong}
    with pytest.raises(ConfigError, match=message):
        DevicePlanner(settings.pop("topology"), **settings)


WRONG_INPUTS = {
    "float ids": ("count", [torch.zeros(2, 2)], "ids must be integers, got torch.float32"),
    "ids elsewhere": ("count", [integers(2, 2, device="meta")], f"on {DEVICE.type}.*, got meta"),
    "ids of a view": ("count", [integers(2, 4).T], r"contiguous: shape \[4, 2\], strides \[1, 4\]"),
    "too many ids": ("count", [integers(6, 2)], "12 routed rows, but the buffers are for 10"),
    "loads of other ranks": (
        "plan",
        [integers(3, 8)],
        r"loads must be \[ranks, experts\] = \[4, 8\], got \[3, 8\]",
    ),
    "float loads": ("plan", [torch.zeros(4, 8)], "int32 or int64, got torch.float32"),
    "loads by columns": ("plan", [integers(8, 4).T], r"contiguous, got strides \(1, 4\)"),
    "loads elsewhere": ("plan", [integers(4, 8, device="meta")], f"{DEVICE.type}.*, got meta"),
    "ids of 64 unsigned bits": (
        "count",
        [integers(3, 2, dtype=torch.uint64)],
        r"ids of torch.uint64 may not fit into int64; convert",
    ),
    "no plan": ("reroute", [integers(2, 2)], r"call plan\(\) before reroute"),
}


@pytest.mark.parametrize(("verb", "inputs", "message"), WRONG_INPUTS.values(), ids=WRONG_INPUTS)
def test_invalid_inputs(verb, inputs, message):
    with pytest.raises(LoadError, match=message):
        getattr(control_of(FEW, rows=10), verb)(*inputs)


def test_buffers_may_be_full_and_there_may_be_no_rows_at_all():
    assert control_of(FEW, rows=10).count(integers(5, 2)).tolist() == [10] + [0] * 7
    control = control_of(FEW, rows=0)
    assert control.count(integers(0, 2)).tolist() == [0] * 8
    control.plan(integers(4, 8))
    routes = control.reroute(integers(0, 2))
    assert routes.slots.shape == (0, 2)
    assert routes.send_counts.tolist() == [0] * 4
    control.check()


# The balancer that uses it


def test_a_balancer_reuses_its_buffers():
    balancer = Balancer._with_settings("alone", experts=8, kernels=True, data_plane="messages")
    counted(balancer, skewed_ids(0, tokens=30).to(DEVICE))
    plane = balancer.plane(DEVICE)
    first = plane.kernels.control
    counted(balancer, skewed_ids(0, tokens=first.rows).to(DEVICE))
    assert plane.kernels.control is first
    counted(balancer, skewed_ids(0, tokens=first.rows + 1).to(DEVICE))
    assert plane.kernels.control.rows > first.rows
    larger = plane.kernels.control
    counted(balancer, skewed_ids(0, tokens=30).to(DEVICE))
    assert plane.kernels.control is larger


def test_interleaved_microbatches_get_their_own_plans():
    balancer = Balancer._with_settings("alone", experts=8, kernels=True, data_plane="messages")
    twin = Balancer._with_settings("alone", experts=8, backend="reference", data_plane="messages")
    every = [skewed_ids(seed, tokens=30 + seed) for seed in range(3)]
    names, actual = (None, "none", "ultraep"), []
    for own, device in ((balancer, DEVICE), (twin, torch.device("cpu"))):
        begun = [
            counted(own, ids.to(device), policy=name)
            for ids, name in zip(every, names, strict=True)
        ]
        plans = [microbatch.plan() for microbatch in begun]
        slots = [microbatch.reroute().slots.tolist() for microbatch in reversed(begun)]
        actual.append([*(plan.rank_loads.tolist() for plan in plans), *slots])
    assert actual[0] == actual[1]


# Planning and rerouting end whatever loads the kernels read: those of a rank that died


SECONDS = 120  # far more than a plan takes through the interpreter
CONFIGS = {
    "balance": BalanceConfig(objective="balance"),
    "tolerance": BalanceConfig(objective="balance", tolerance=0.05),
    "time": BalanceConfig(rates=Rates(row=1000, copy=100_000, each=10, layer=1000)),
    "time, cheap replicas": BalanceConfig(rates=Rates(row=1_000_000, copy=1)),
}
SIZES = {
    "two ranks": Topology(ranks=2, experts=4, slots=1),
    "domains": Topology(ranks=4, experts=16, slots=1, domain=2),
    "two slots": Topology(ranks=4, experts=12, slots=2),
}


def garbage(kind, shape, rng):
    low, high = {
        "any": (-(2**31), 2**31),
        "64 bits": (-(2**62), 2**62),
        "small": (-5, 5),
        "negative": (-(2**20), 0),
        "huge": (2**30, 2**31),
    }[kind]
    return rng.integers(low, high, shape)


@pytest.fixture
def time_limit():
    def raise_timeout(*_):
        raise TimeoutError("a kernel did not end")

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not interpreted(), reason="a kernel cannot be interrupted")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", ["any", "64 bits", "small", "negative", "huge"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "topology", ["two ranks", "two slots", pytest.param("domains", marks=pytest.mark.slow)]
)
def test_planning_ends(topology, config, kind, time_limit):
    shape = SIZES[topology].ranks, SIZES[topology].experts
    control = DevicePlanner(SIZES[topology], CONFIGS[config], rows=9, device=DEVICE)
    ids = torch.zeros(9, 1, dtype=torch.int32, device=DEVICE)
    for seed in range(2):  # the sums of some seeds overflow
        rng = np.random.default_rng(seed)
        loads = rng.integers(0, 50, shape)
        loads[1:] = garbage(kind, loads[1:].shape, rng)
        with watched():
            control.plan(torch.tensor(loads, device=DEVICE))
            control.reroute(ids)
