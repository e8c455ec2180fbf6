"""Rows between GPUs: the kernels put them where a few lines of Python put them."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from cases import draw_ids, plan_of, routings, with_padding
from guard import watched
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ultraep import Topology
from ultraep.backends.triton.device import default_device, interpreted
from ultraep.backends.triton.exchange import SCALAR, RowExchange, RowMap, aligned
from ultraep.comm import Region
from ultraep.reroute import reroute

DEVICE = default_device()
only_interpreted = pytest.mark.skipif(
    not interpreted(), reason="a compiler would need seconds for every new shape"
)
UNSHRUNK = [Phase.explicit, Phase.reuse, Phase.generate]
SENTINEL = 99.0
RANK = 1 << 32  # factor of a rank in origins and landings


def make_region(ranks, num_bytes):
    """Return the regions of all ranks, filled with garbage."""
    pieces = [
        torch.full((num_bytes,), 0xAB, dtype=torch.uint8, device=DEVICE) for _ in range(ranks)
    ]
    addresses = torch.tensor([piece.data_ptr() for piece in pieces], device=DEVICE)
    return [Region(piece, addresses) for piece in pieces]


def pieces_of(*regions):
    return [piece.local for region in regions for piece in region]


class Route(NamedTuple):
    """What a control plane knows about the rows of one rank."""

    slots: torch.Tensor
    positions: torch.Tensor
    order: torch.Tensor
    rows_of_slot: torch.Tensor
    receive_counts: torch.Tensor


def route_of(ids, plan, rank):
    routes = reroute(ids, plan, rank)
    positions, order = torch.full((2, ids.numel()), -1, dtype=torch.int32)
    positions[routes.order] = torch.arange(len(routes.order), dtype=torch.int32)
    order[: len(routes.order)] = routes.order
    parts = (routes.slots, positions, order, routes.rows_of_slot, routes.receive_counts)
    return Route(*(torch.as_tensor(part).to(DEVICE, torch.int32) for part in parts))


class Twin:
    """The same in Python: every arrived row is a pair of a rank and one of its routed rows."""

    def __init__(self, ids, plan, capacity):
        first = plan.topology.first_slot_of_rank
        actual = [reroute(own, plan, rank) for rank, own in enumerate(ids)]
        sent = [[s.tolist() for s in r.order.split(r.rows_of_slot.tolist())] for r in actual]
        self.by_slot = [
            [
                [(source, row) for source in range(len(ids)) for row in sent[source][slot]]
                for slot in range(first[rank], first[rank + 1])
            ]
            for rank in range(len(ids))
        ]
        self.totals = [sum(map(len, slots)) for slots in self.by_slot]
        self.arrived = [[pair for slot in slots for pair in slot] for slots in self.by_slot]
        self.arrived = [pairs[:capacity] for pairs in self.arrived]
        self.landings = {
            pair: (rank, row)
            for rank, pairs in enumerate(self.arrived)
            for row, pair in enumerate(pairs)
        }

    def offsets(self, rank, capacity):
        ends = np.cumsum([0, *map(len, self.by_slot[rank])])
        return np.minimum(ends, capacity).tolist()

    def gathered(self, rank, values, top_k):
        rows = [values[source][row // top_k] for source, row in self.arrived[rank]]
        return torch.stack(rows) if rows else values[rank][:0]

    def landing(self, rank, row):
        target, arrived = self.landings.get((rank, row), (0, -1))
        return target * RANK + arrived

    def summed(self, rank, served, tokens, top_k):
        """[T, D] sums in the order of choices, rounded once."""
        wide = torch.float64 if served[0].dtype == torch.float64 else torch.float32
        sums = torch.zeros(tokens, served[0].shape[1], dtype=wide)
        for row in range(tokens * top_k):
            if (rank, row) in self.landings:
                target, arrived = self.landings[rank, row]
                sums[row // top_k] += served[target][arrived].to(wide)
        return sums.to(served[0].dtype)


class Group:
    """All ranks of a small group in this process, one after the other."""

    def __init__(self, ids, plan, *, width=8, dtype=torch.float32, capacity=None, programs=3):
        self.ids, self.plan, self.width, self.dtype = ids, plan, width, dtype
        self.ranks, self.top_k = len(ids), ids[0].shape[1]
        self.capacity = max(1, int(plan.rank_loads.max())) if capacity is None else capacity
        self.twin = Twin(ids, plan, self.capacity)
        self.rows, tokens = max(1, *map(len, ids)) * self.top_k, max(1, *map(len, ids))
        fault = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        first_slots = plan.topology.first_slot_of_rank
        self.exchanges = [
            RowExchange(first_slots, rank=rank, fault=fault, programs=programs)
            for rank in range(self.ranks)
        ]
        row_bytes = width * dtype.itemsize
        self.tables = make_region(self.ranks, self.exchanges[0].table_bytes(self.rows))
        self.values = make_region(self.ranks, aligned(tokens * row_bytes))
        self.served = make_region(self.ranks, aligned(self.capacity * row_bytes))
        self.scalars = make_region(self.ranks, self.capacity * SCALAR)
        self.maps = [self.empty_map(own.numel()) for own in ids]
        self.rank_loads = torch.tensor(plan.rank_loads, dtype=torch.int32, device=DEVICE)
        self.gates = [torch.zeros(self.capacity, device=DEVICE) for _ in self.exchanges]
        self.routes = [route_of(own, plan, rank) for rank, own in enumerate(ids)]

    def empty_map(self, rows):
        zeros = torch.zeros(self.capacity + rows, dtype=torch.int64, device=DEVICE)
        return RowMap(None, None, zeros[: self.capacity], zeros[self.capacity :])

    def make_tables(self, rank, times=1):
        """Write the tables of a rank; the results go into its map."""
        route = self.routes[rank]
        sizes = self.rows, self.capacity
        tables, received = self.tables[rank], route.receive_counts * times
        arguments = route.rows_of_slot, received, self.rank_loads
        offsets, wrong = self.exchanges[rank].tables(tables, *arguments, *sizes)
        self.maps[rank] = replace(self.maps[rank], offsets=offsets, wrong=wrong)

    @property
    def members(self):
        return list(zip(range(self.ranks), self.exchanges, self.maps, self.routes, strict=True))

    @property
    def exposed(self):
        return pieces_of(self.tables, self.values, self.served, self.scalars)

    def dispatch(self, values, gates):
        """[capacity, D] the rows that arrive at every rank."""
        for rank, exchange, _, route in self.members:
            self.make_tables(rank)
            exchange.expose(self.tables[rank], route.order, gates[rank].to(DEVICE), self.rows)
            exchange.expose_values(self.values[rank], values[rank].to(DEVICE))
        for rank, exchange, row_map, route in self.members:
            tables, gates_A = self.tables[rank], self.gates[rank]
            exchange.origins(tables, route.receive_counts, row_map.origins, gates_A, self.rows)
            landings = route.slots, route.positions, row_map.landings
            exchange.landings(tables, *landings, self.capacity)
        return [self.gather(rank) for rank in range(self.ranks)]

    def gather(self, rank):
        gathered = torch.full((self.capacity, self.width), SENTINEL).to(DEVICE, self.dtype)
        row_map, values = self.maps[rank], self.values[rank]
        self.exchanges[rank].gather_rows(values, row_map, gathered, self.top_k)
        return gathered.cpu()

    def combine(self, served, scalars=None):
        """[T, D] sums for every rank, and [T, K] scalars."""
        for rank, rows in enumerate(served):
            self.served[rank].local[: rows.nbytes].copy_(bits(rows).view(-1))
            if scalars is not None:
                own = scalars[rank].float()
                self.scalars[rank].local[: own.nbytes].copy_(bits(own))
        return [self.sum(rank, scalars is not None) for rank in range(self.ranks)]

    def sum(self, rank, with_scalars):
        tokens = len(self.ids[rank])
        summed = torch.full((tokens, self.width), SENTINEL).to(DEVICE, self.dtype)
        scalars = torch.full((tokens, self.top_k), SENTINEL, device=DEVICE)
        beside = (self.scalars[rank], scalars) if with_scalars else (None, None)
        self.exchanges[rank].sum_rows(
            self.served[rank], beside[0], self.maps[rank], summed, beside[1], self.top_k
        )
        return summed.cpu(), scalars.cpu()

    def random(self, rows, seed):
        """Rows of many magnitudes: another order would give other sums."""
        draw = torch.Generator().manual_seed(seed)
        actual = []
        for number in rows:
            sizes = torch.randint(-9, 9, (number, self.width), generator=draw)
            actual.append((torch.randn(sizes.shape, generator=draw) * 2.0**sizes).to(self.dtype))
        return actual


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def assert_there_and_back(group, seed=0):
    """Both directions, bit for bit, and nothing else is written."""
    values = group.random(map(len, group.ids), seed)
    gates = [torch.rand(own.shape) for own in group.ids]
    arrivals = group.dispatch(values, gates)
    assert_mapped(group, gates)
    for rank, rows in enumerate(arrivals):
        expected = group.twin.gathered(rank, values, group.top_k)
        assert torch.equal(bits(rows[: len(expected)]), bits(expected))
        assert (rows[len(expected) :] == SENTINEL).all()
    served = group.random([group.capacity] * group.ranks, seed + 1)
    scalars = [torch.rand(group.capacity) for _ in group.ids]
    assert_sums(group, served, scalars, group.combine(served, scalars))
    assert torch.equal(bits(group.sum(0, False)[0]), bits(group.sum(0, True)[0]))


def assert_mapped(group, gates):
    capacity = group.capacity
    for rank, _, row_map, route in group.members:
        pairs = group.twin.arrived[rank]
        assert route.receive_counts.sum() == group.twin.totals[rank]
        assert row_map.offsets.tolist() == group.twin.offsets(rank, capacity)
        origins = [source * RANK + row for source, row in pairs]
        assert row_map.origins.tolist() == origins + [0] * (capacity - len(pairs))
        expected = [gates[source].view(-1)[row].item() for source, row in pairs]
        assert group.gates[rank].tolist() == expected + [0] * (capacity - len(pairs))
        number = group.ids[rank].numel()
        landings = [group.twin.landing(rank, row) for row in range(number)]
        assert row_map.landings.tolist() == landings


def assert_sums(group, served, scalars, actual):
    for rank, (sums, beside) in enumerate(actual):
        tokens = len(group.ids[rank])
        expected = group.twin.summed(rank, served, tokens, group.top_k)
        assert torch.equal(bits(sums), bits(expected))
        for row, scalar in enumerate(beside.view(-1).tolist()):
            target, arrived = group.twin.landings.get((rank, row), (0, None))
            assert scalar == (0 if arrived is None else scalars[target][arrived].item())


def random_group(seed=0, *, ranks=3, tokens=(7, 0, 5), top_k=2, padding=0.2, slots=1, **settings):
    topology = Topology(ranks=ranks, experts=2 * ranks, slots=slots)
    rng = np.random.default_rng(seed)
    ids = [draw_ids(rng, number, top_k, topology, 1.5) for number in tokens]
    ids = [with_padding(rng, own, padding) for own in ids]
    return Group(ids, plan_of(ids, topology), **settings)


@pytest.mark.slow
@only_interpreted
@settings(max_examples=25, phases=UNSHRUNK)
@given(
    routings().filter(lambda routing: 2 <= len(routing[0]) <= 4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 9),
)
def test_random_routings(routing, dtype, width):
    ids, plan = routing
    group = Group(ids, plan, width=width, dtype=dtype)
    with watched(also=group.exposed):
        assert_there_and_back(group)
    assert group.exchanges[0].faults[0] == 0


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("width", [1, 8, 130])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widths_and_types(dtype, width):
    assert_there_and_back(random_group(width=width, dtype=dtype))


@pytest.mark.parametrize("top_k", [1, 3, 10])
def test_numbers_of_choices_and_ranks_without_slots(top_k):
    topology = Topology(ranks=4, experts=12, slots=0, homes=[0] * 4 + [2] * 8)
    rng = np.random.default_rng(3)
    ids = [draw_ids(rng, tokens, top_k, topology, 0.5) for tokens in (6, 4, 1, 0)]
    assert_there_and_back(Group(ids, plan_of(ids, topology)))


def test_more_tiles_than_programs():
    """Rows of several tiles, several of them to a program."""
    group = random_group(2, ranks=2, tokens=(150, 60), width=1544, programs=2)
    assert group.capacity * group.width > 4 * group.exchanges[0].programs * 2**14
    assert_there_and_back(group)


def test_more_slots_than_a_tile_of_the_tables():
    """Tables are written in steps; 5000 slots take three."""
    topology = Topology(ranks=2, experts=5000, slots=0)
    ids = [torch.from_numpy(np.random.default_rng(r).integers(0, 5000, (20, 2))) for r in range(2)]
    group = Group(ids, plan_of(ids, topology))
    for rank in range(2):
        group.make_tables(rank)
    for rank, exchange, row_map, route in group.members:
        words = group.tables[rank].local.view(torch.int32)
        begins = route.rows_of_slot.cumsum(0) - route.rows_of_slot
        assert torch.equal(words[exchange._begins_at // 4 :][:5000], begins.int())
        blocks_LR = route.receive_counts.T.reshape(-1)
        blocks_LR = (blocks_LR.cumsum(0) - blocks_LR).view(-1, 2)
        assert torch.equal(words[:5000].view(2, -1), blocks_LR.T.int())
        assert row_map.offsets.tolist() == group.twin.offsets(rank, group.capacity)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("width", [3, 6, 16])
def test_bytes_are_moved_too(dtype, width):
    group = random_group(width=width, dtype=torch.int8)
    group.dtype = dtype
    values = [torch.randint(-99, 99, (len(own), width), dtype=torch.int8) for own in group.ids]
    gates = [torch.rand(own.shape) for own in group.ids]
    arrivals = group.dispatch([own.view(dtype) for own in values], gates)
    for rank, rows in enumerate(arrivals):
        expected = group.twin.gathered(rank, values, group.top_k)
        assert torch.equal(rows.view(torch.int8)[: len(expected)], expected)


@pytest.mark.parametrize("offset", [0, 1, 2, 5])
def test_values_that_begin_anywhere(offset):
    """Words are as wide as the alignment allows; the last bytes are copied one by one."""
    group = random_group(tokens=(9, 1, 3), width=5, dtype=torch.int8, programs=2)
    for rank, own in enumerate(group.ids):
        memory = torch.arange(offset, offset + 64, dtype=torch.int8, device=DEVICE)
        values = memory[offset : offset + 5 * len(own)].view(len(own), 5)
        group.exchanges[rank].expose_values(group.values[rank], values)
        local = group.values[rank].local
        assert torch.equal(local[: values.numel()].view(torch.int8), values.reshape(-1))
        assert (local[values.numel() :] == 0xAB).all()


@pytest.mark.parametrize("missing", [1, 4, 1000])
def test_rows_above_the_capacity(missing):
    """Rows above the capacity are dropped and counted; all sums are NaN."""
    full = random_group(4, tokens=(20, 7, 9), padding=0.0, slots=0)
    capacity = max(1, full.capacity - missing)
    group = Group(full.ids, full.plan, capacity=capacity)
    with watched(also=group.exposed):
        gates = [torch.rand(own.shape) for own in group.ids]
        group.dispatch(group.random(map(len, group.ids), 0), gates)
        assert_mapped(group, gates)
        sums = group.combine(group.random([capacity] * group.ranks, 1))
    assert all(total.isnan().all() for total, _ in sums)
    for rank, exchange, *_ in group.members:
        total = group.twin.totals[rank]
        assert exchange.faults.tolist() == [int(total > capacity), total]
    assert max(group.twin.totals) > capacity


def test_the_most_that_ever_arrived_is_remembered():
    group = random_group(4, tokens=(20, 7, 9), capacity=1)
    for times in (3, 5, 2):
        group.make_tables(0, times)
    assert group.exchanges[0].faults.tolist() == [3, 5 * group.twin.totals[0]]


@only_interpreted
@pytest.mark.parametrize(("seed", "capacity"), [(0, 5), (1, 5), (2, 900)])
def test_invalid_routes_stay_in_bounds(seed, capacity):
    """A wrong plan or a failed rank may leave anything in the tables."""
    group = random_group(seed, capacity=capacity)
    rng = np.random.default_rng(seed)

    def noise(tensor):
        drawn = rng.integers(-(2**31), 2**31, tensor.shape) >> rng.integers(0, 32, tensor.shape)
        return torch.from_numpy(drawn).to(torch.int32)

    group.routes = [Route(*map(noise, route)) for route in group.routes]
    values = group.random(map(len, group.ids), 0)
    gates = [torch.rand(own.shape) for own in group.ids]
    with watched(also=group.exposed):
        group.dispatch(values, gates)
        group.combine(group.random([capacity] * group.ranks, 1), [torch.rand(capacity)] * 3)
