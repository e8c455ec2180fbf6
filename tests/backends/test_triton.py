"""Every GPU kernel returns the bits of its twin; without a GPU, Triton interprets it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cases import (
    MAX_TOTAL,
    NAMED,
    assert_same_plan,
    configs,
    draw_ids,
    one_hot,
    plan_of,
    problems,
    routings,
    timed_configs,
    with_speeds,
)
from guard import watched
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import ultraep
from ultraep import BalanceConfig, Rates, Topology, backends, workload
from ultraep.backends.reference.reroute import stride
from ultraep.backends.triton.device import default_device, interpreted
from ultraep.backends.triton.kernels.reroute import place_on_line
from ultraep.backends.triton.rerouter import ROWS, strides
from ultraep.reroute import reroute
from ultraep.runtime.device_planner import DevicePlanner

DEVICE = default_device()
only_interpreted = pytest.mark.skipif(
    not interpreted(), reason="a compiler would need seconds for every new shape"
)
UNSHRUNK = [Phase.explicit, Phase.reuse, Phase.generate]  # shrinking takes many minutes
few = settings(max_examples=25, phases=UNSHRUNK)
SMALL = [name for name in NAMED if name != "wide"]
EXACT = BalanceConfig()
LOOSE = BalanceConfig(tolerance=0.05, max_replicas=2, min_tokens_per_replica=3)
FEW_LINKS = BalanceConfig(rates=Rates(row=1000, copy=20_000, each=500))


def on_device(values):
    return torch.tensor(values).to(DEVICE) if isinstance(values, np.ndarray) else values.to(DEVICE)


def control_of(topology, config=None, *, rows=0, rank=0):
    return DevicePlanner(topology, config, rows=rows, rank=rank, device=DEVICE)


def planned(loads, topology, config):
    return control_of(topology, config).plan(on_device(loads)).to_host()


def assert_planned(loads, topology, config=EXACT):
    assert_same_plan(planned(loads, topology, config), ultraep.plan(loads, topology, config))


# Plans


def speeds_of(topology, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.choice([800, 900, 950, 1000, 1250], topology.ranks).tolist())


@pytest.mark.parametrize("speeds", [False, True], ids=["equal", "speeds"])
@pytest.mark.parametrize(
    "config",
    [EXACT, LOOSE, BalanceConfig(tolerance=0.3, locality=False, min_tokens_per_replica=20)],
    ids=str,
)
@pytest.mark.parametrize("name", SMALL)
def test_plans_of_named_cases(name, config, speeds):
    loads, topology = NAMED[name]
    assert_planned(loads, topology, replace(config, speeds=speeds_of(topology) if speeds else None))


def maybe_with_speeds(data, config, topology):
    return with_speeds(data.draw, config, topology.ranks) if data.draw(st.booleans()) else config


@only_interpreted
@few
@given(problems(), configs, st.data())
def test_plans_of_random_cases(problem, config, data):
    loads, topology = problem
    assert_planned(loads, topology, maybe_with_speeds(data, config, topology))


@pytest.mark.slow
@only_interpreted
@few
@given(problems(), timed_configs, st.data())
def test_plans_by_time_of_random_cases(problem, config, data):
    loads, topology = problem
    assert_planned(loads, topology, maybe_with_speeds(data, config, topology))


def test_rates_and_speeds_may_change_between_plans():
    loads, topology = NAMED["zipf_two_slots"]
    config = BalanceConfig(rates=Rates(row=1000, copy=10_000))
    control = control_of(topology, config)
    for changed in (
        *(replace(config, speeds=speeds_of(topology, seed)) for seed in range(2)),
        *(replace(config, rates=rates) for rates in (Rates(row=1000, each=50_000), None)),
        replace(config, rates=Rates(row=1, layer=10**9), speeds=[900] * 16),
        config,
    ):
        assert control.use(changed)
        actual = control.plan(on_device(loads)).to_host()
        assert_same_plan(actual, ultraep.plan(loads, topology, changed))


def full(ranks, experts, slots=1):
    """Loads that sum to the largest allowed total, half of them for the first expert."""
    loads = workload.zipf(ranks, experts, ratio=3.0, top_k=1, tokens=1000)
    loads[0, 0] = MAX_TOTAL // 2
    loads[1, 1] = MAX_TOTAL - loads.sum() + loads[1, 1]
    assert loads.sum() == MAX_TOTAL
    return loads, Topology(ranks=ranks, experts=experts, slots=slots)


def zipf(ranks, experts, ratio=3.0, **topology):
    loads = workload.zipf(ranks, experts, ratio=ratio, tokens=512, shuffled=True)
    return loads, Topology(ranks=ranks, experts=experts, **topology)


LARGE = {
    "72 ranks": zipf(72, 144),
    "domains of 24 ranks": zipf(48, 96, domain=24),
    "the largest total": full(40, 40),
    "the largest total, two slots": full(16, 32, slots=2),
    "one hot": (one_hot(33, 33, tokens=64), Topology(ranks=33, experts=33)),
    "wide": NAMED["wide"],
}


@pytest.mark.parametrize(
    "config",
    [EXACT, *(pytest.param(c, marks=pytest.mark.slow) for c in (LOOSE, FEW_LINKS))],
    ids=str,
)
@pytest.mark.parametrize("name", LARGE)
def test_plans_of_large_domains(name, config):
    loads, topology = LARGE[name]
    for speeds in (None, speeds_of(topology)):
        assert_planned(loads, topology, replace(config, speeds=speeds))


@pytest.mark.parametrize(
    "strange",
    [
        lambda loads: torch.as_tensor(loads, dtype=torch.int32),
        lambda loads: torch.nn.functional.pad(torch.as_tensor(loads), (3, 2), value=-9)[:, 3:-2],
        lambda loads: torch.as_tensor(loads).repeat_interleave(2, 0)[::2],
    ],
    ids=["int32", "columns of a table", "every other row"],
)
def test_loads_that_are_a_view(strange):
    loads, topology = NAMED["zipf_two_slots"]
    plan = control_of(topology).plan(strange(loads).to(DEVICE))
    assert_same_plan(plan.to_host(), ultraep.plan(loads, topology))


def test_a_planner_forgets_the_last_plan():
    loads, topology = NAMED["zipf_two_slots"]
    control = control_of(topology)
    for current in (loads, loads[:, ::-1].copy(), np.zeros_like(loads), np.ones_like(loads), loads):
        actual, expected = control.plan(on_device(current)), ultraep.plan(current, topology)
        assert_same_plan(actual.to_host(), expected)
        assert_cleared(actual, expected.num_replicas)


def assert_cleared(plan, number):
    """Rows behind the last replica are cleared."""
    assert int(plan.num_replicas) == number
    assert (plan.replicas[number:] == -1).all()
    assert (plan.slot_of_replica[number:] == -1).all()
    assert not plan.quotas[number:].any()
    assert not plan.split[number:].any()


@pytest.mark.parametrize("name", ["zipf_two_slots", "unclosable", "lognormal_domains"])
@pytest.mark.parametrize("copy", [0, 20_000])
def test_plans_by_time_of_named_cases(name, copy):
    loads, topology = NAMED[name]
    config = BalanceConfig(rates=Rates(row=1000, copy=copy, each=500))
    assert_planned(loads, topology, config)
    assert_planned(loads, topology, replace(config, speeds=speeds_of(topology)))


# Counts


@pytest.mark.parametrize(
    ("rows", "experts"),
    [(rows, 10) for rows in (0, 1, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS, 2 * ROWS + 1)]
    + [(700, experts) for experts in (1, 7, 8, 64, 127, 128, 300)],
)
def test_counts_at_the_edges_of_tiles(rows, experts):
    ids = np.random.default_rng(rows).integers(-2, experts + 2, rows)
    expected, unknown = backends.select("cpu").count(ids, experts)
    control = control_of(Topology(ranks=1, experts=experts), rows=rows)
    assert control.count(on_device(ids[:, None])).tolist() == expected.tolist()
    assert control.faults.tolist() == [unknown, 0, 0]


@triton.jit
def places(numbers, length, table, PRODUCT: tl.constexpr, B: tl.constexpr):
    """Write the places of some rows of a line whose rows all go away."""
    row = tl.arange(0, B)
    length_B = length + row * 0
    place = place_on_line(tl.load(numbers + row), length_B, length_B, table, row >= 0, PRODUCT)
    tl.store(numbers + row, place)


@pytest.mark.parametrize(
    ("length", "product"), [(65535, tl.uint32), (65536, tl.uint32), (65536, tl.int64)], ids=str
)
def test_the_longest_lines_have_room_for_a_product(length, product):
    numbers = np.linspace(0, length - 1, 64).astype(int)
    actual, table = (on_device(n).to(torch.int32) for n in (numbers, strides(length)))
    places[(1,)](actual, length, table, PRODUCT=product, B=64)
    assert actual.tolist() == (numbers * stride(length) % length).tolist()


@pytest.mark.parametrize(("rows", "product"), [(1 << 16, tl.uint32), ((1 << 16) + 1, tl.int64)])
def test_long_lines_are_counted_with_more_bits(rows, product):
    assert control_of(Topology(ranks=1, experts=1), rows=rows)._rerouter.product == product


# Routes on the device


def routed(ids, plan, rank):
    own = BalanceConfig(policy="none") if rank % 2 else None
    control = control_of(plan.topology, own, rows=ids.numel(), rank=rank)
    assert control.adopt(plan).to_host() == plan
    return control.reroute(on_device(ids)), control


def assert_same_routes(actual, ids, plan, rank):
    expected = reroute(ids.to(torch.int64), plan, rank)
    sent = len(expected.order)
    assert actual.slots.tolist() == expected.slots.tolist()
    assert actual.order.tolist() == expected.order.tolist() + [-1] * (ids.numel() - sent)
    assert actual.rows_of_slot.tolist() == expected.rows_of_slot.tolist()
    assert actual.send_counts.tolist() == expected.send_counts
    assert actual.receive_counts.tolist() == expected.receive_counts.tolist()
    assert int(actual.receive_counts.sum()) == plan.rank_loads[rank]
    positions = actual.positions.cpu()
    padding = positions == -1
    assert torch.equal(padding, (ids == -1).reshape(-1))
    assert positions[~padding].sort().values.tolist() == list(range(sent))
    rows = torch.arange(ids.numel(), dtype=torch.int32)
    assert torch.equal(actual.order.cpu()[positions[~padding].long()], rows[~padding])


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str
)
def test_ids_of_any_integer_type(dtype):
    topology = Topology(ranks=4, experts=32, slots=2)
    rng = np.random.default_rng(0)
    ids = [draw_ids(rng, 100, 2, topology, 2.0) for _ in range(4)]
    if dtype.is_signed:
        ids = [own.where(own > 1, -1) for own in ids]
    plan = plan_of(ids, topology)
    actual, control = routed(ids[1].to(dtype), plan, 1)
    assert_same_routes(actual, ids[1], plan, 1)
    control.check()


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("rows", [0, 1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS])
def test_routes_at_the_edge_of_a_tile(rows, top_k):
    topology = Topology(ranks=3, experts=6, slots=2)
    rng = np.random.default_rng(rows)
    ids = [draw_ids(rng, max(1, rows // top_k), top_k, topology, 2.0) for _ in range(3)]
    ids[2] = draw_ids(rng, rows // top_k, top_k, topology, 2.0)
    plan = plan_of(ids, topology)
    actual, control = routed(ids[2], plan, 2)
    assert_same_routes(actual, ids[2], plan, 2)
    control.check()


@only_interpreted
@few
@given(routings())
def test_routes_of_random_plans(routing):
    ids, plan = routing
    rank = len(ids) - 1
    assert_same_routes(routed(ids[rank], plan, rank)[0], ids[rank], plan, rank)


def test_ids_out_of_range_are_counted_and_have_no_slot():
    topology = Topology(ranks=2, experts=8)
    strange = [-(2**63), -(2**31) - 1, -2, 8, 9, 255, 2**31, 2**32, 2**32 + 3, 2**63 - 1]
    ids = torch.tensor([[3, id_] for id_ in strange])
    control = control_of(topology, rows=20)
    assert control.count(on_device(ids)).tolist() == [0, 0, 0, 10, 0, 0, 0, 0]
    assert control.faults.tolist() == [10, 0, 0]
    control.plan(on_device(np.eye(2, 8, 3, dtype=int) * 10))
    routes = control.reroute(on_device(ids), counted=True)
    assert routes.slots[:, 1].tolist() == [-1] * 10
    assert routes.slots[:, 0].min() >= 0
    assert routes.order.tolist()[10:] == [-1] * 10


# Kernels access only their tensors

KERNEL_NAMES = {
    *("sum_loads", "search", "split", "tile_counts", "tile_offsets"),
    *("lay_lines", "assign", "receive"),
}


def run_all(loads, topology, config, ids, rank):
    """Launch every kernel once."""
    control = control_of(topology, config, rows=ids.numel(), rank=rank)
    control.count(ids)
    control.plan(loads)
    control.reroute(ids)
    control.reroute(ids, counted=True)


WATCHED_CASES = [
    *[(name, BalanceConfig()) for name in ("zipf_two_slots", "lognormal_domains")],
    *[(name, BalanceConfig()) for name in ("unclosable", "near_overflow")],
    *[(name, LOOSE) for name in ("uneven_homes", "a_rank_without_homes", "no_slots")],
    *[(name, FEW_LINKS) for name in ("unclosable", "no_slots", "a_rank_without_homes")],
]


@only_interpreted
@pytest.mark.parametrize(("name", "config"), WATCHED_CASES)
def test_no_kernel_leaves_its_tensors(name, config):
    """The ids do not match the loads, and some are out of range."""
    loads, topology = NAMED[name]
    rng = np.random.default_rng(0)
    ids = on_device(rng.integers(-2, topology.experts + 2, (ROWS // 2 + 1, 2)))
    with watched() as watch:
        run_all(on_device(loads), topology, config, ids, topology.ranks - 1)
    expected = KERNEL_NAMES - (set() if topology.slots else {"split"})
    if config.rates:
        expected = expected - {"search"} | {"plan_by_time"}
    assert watch.kernels >= expected
