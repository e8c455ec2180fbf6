"""Exact optima of small planning problems, by a mixed-integer program.

It shares only the topology with the planner, so each can check the other.

Shapes: R ranks of a domain, E experts of a domain, P pairs of an expert and a host that is not its
home. The unknowns are whether a pair has a replica, how many rows it serves, and the peak:

    minimise   peak
    such that  rows of a pair            <=  load of its expert if it has a replica, else 0
               replicas on a rank        <=  slots
               rows of an expert's pairs <=  its load
               rows served by a rank     <=  peak

Rows are continuous: for fixed replicas they are a flow, and a flow through integer capacities can
be made integer. The solver uses floats, so its answer proves only the lower bound: its tolerances
can only make the peak too small. The upper bound is an integer flow through the replicas it chose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import block_array, csr_array, diags_array, eye_array
from scipy.sparse.csgraph import maximum_flow

from ultraep.arrays import IntArray
from ultraep.topology import Topology

OPTIMAL, OUT_OF_TIME = 0, 1  # status of scipy.optimize.milp
NOISE = 1e-6


class Unproven(Exception):
    """The solver ran out of time, or no integer flow confirms its answer."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """All pairs of an expert with load and a rank of its domain that is not its home."""

    loads: IntArray  # [E]
    homes: IntArray  # [E]
    ranks: int
    expert: IntArray  # [P]
    host: IntArray  # [P]

    @property
    def rank_loads(self) -> IntArray:
        """[R] rows per rank without replicas."""
        return np.bincount(self.homes, self.loads, self.ranks).astype(np.int64)

    @property
    def mean(self) -> int:
        """Mean rows per rank, rounded up."""
        return -(-int(self.loads.sum()) // self.ranks)


def optimal_peak(expert_loads: IntArray, topology: Topology, time_limit: float = 60.0) -> int:
    """Rows of the busiest rank in the best plan that slots and domains allow.

    Three ranks with one expert each and one slot each, so rank 0 keeps 9 - 3 - 3:

    >>> optimal_peak(np.array([9, 0, 0]), Topology(ranks=3, experts=3, slots=1))
    3

    Raises `Unproven` if a domain takes longer than `time_limit` seconds.
    """
    homes, size = topology.home_of_expert, topology.domain_size
    peaks = []
    for begin in range(0, topology.ranks, size):
        inside = (homes >= begin) & (homes < begin + size)
        pairs = pairs_of(expert_loads[inside], homes[inside] - begin, size)
        peaks.append(_peak_of_domain(pairs, topology.slots, time_limit))
    return max(peaks)


def pairs_of(loads_E: IntArray, homes_E: IntArray, ranks: int) -> Pairs:
    loaded = np.flatnonzero(loads_E)
    expert, host = np.repeat(loaded, ranks), np.tile(np.arange(ranks), len(loaded))
    away = homes_E[expert] != host
    return Pairs(loads_E, homes_E, ranks, expert[away], host[away])


def _peak_of_domain(pairs: Pairs, slots: int, time_limit: float) -> int:
    fullest = int(pairs.rank_loads.max())
    if fullest == pairs.mean or not slots:
        return fullest
    count = len(pairs.expert)
    matrix, most = rows_of_pairs(pairs, slots)
    peak_column = np.repeat([0.0, -1.0], [len(most) - pairs.ranks, pairs.ranks])[:, None]
    largest = np.concatenate([np.ones(count), pairs.loads[pairs.expert], [fullest]])
    result = milp(
        c=np.append(np.zeros(2 * count), 1.0),
        integrality=np.repeat([1, 0, 1], [count, count, 1]),
        bounds=Bounds(np.append(np.zeros(2 * count), pairs.mean), largest),
        constraints=LinearConstraint(
            block_array([[matrix, csr_array(peak_column)]]), -np.inf, most
        ),
        options={"time_limit": time_limit, "mip_rel_gap": 0.0},
    )
    if result.status != OPTIMAL:
        raise Unproven(f"status {result.status}: {result.message}")
    peak: int = math.ceil(result.mip_dual_bound - NOISE)
    replicated = result.x[:count] > 0.5
    if not _flows(pairs, replicated, peak):
        raise Unproven(f"the replicas of the solver do not reach its peak of {peak}")
    return peak


def rows_of_pairs(pairs: Pairs, slots: int) -> tuple[csr_array, IntArray]:
    """The four constraints in the order of the module docstring, for a peak of 0."""
    num_pairs = len(pairs.expert)

    def sum_over(group_of_P: IntArray, groups: int) -> csr_array:
        places = (group_of_P, np.arange(num_pairs))
        return csr_array((np.ones(num_pairs), places), shape=(groups, num_pairs))

    onto = sum_over(pairs.host, pairs.ranks)
    away = sum_over(pairs.homes[pairs.expert], pairs.ranks)
    of_expert = sum_over(pairs.expert, len(pairs.loads))
    matrix = block_array(
        [
            [diags_array(-pairs.loads[pairs.expert].astype(float)), eye_array(num_pairs)],
            [onto, None],
            [None, of_expert],
            [None, onto - away],
        ]
    )
    most = [np.zeros(num_pairs), np.full(pairs.ranks, slots), pairs.loads, -pairs.rank_loads]
    return matrix, np.concatenate(most)


def _flows(pairs: Pairs, replicated_P: IntArray, peak: int) -> bool:
    """Whether an integer flow source -> expert -> home or replica -> sink carries all rows."""
    experts, ranks = len(pairs.loads), pairs.ranks
    source, sink = experts + ranks, experts + ranks + 1
    all_experts = np.arange(experts)
    serving = np.concatenate([all_experts, pairs.expert[replicated_P]])
    where = np.concatenate([pairs.homes, pairs.host[replicated_P]])
    tails = np.concatenate([np.full(experts, source), serving, experts + np.arange(ranks)])
    heads = np.concatenate([all_experts, experts + where, np.full(ranks, sink)])
    capacity = np.concatenate([pairs.loads, pairs.loads[serving], np.full(ranks, peak)])
    graph = csr_array((capacity.astype(np.int32), (tails, heads)), shape=(sink + 1, sink + 1))
    return bool(maximum_flow(graph, source, sink).flow_value == pairs.loads.sum())


# -- random problems -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SmallCase:
    """A small random problem, which the program solves quickly."""

    shape: str
    topology: Topology
    expert_loads: IntArray  # [E]


SHAPES = ("uniform", "lognormal", "hot few", "rank-skewed", "many small", "few tokens")


def small_cases(count: int, *, seed: int = 0) -> Iterator[SmallCase]:
    """Seeded problems: 2-6 ranks, 1-10 experts per rank, 1-2 slots."""
    for number in range(count):
        rng = np.random.default_rng((seed, number))
        shape = SHAPES[number % len(SHAPES)]
        ranks = int(rng.integers(2, 7))
        experts = ranks * int(rng.integers(6 if shape == "many small" else 1, 11))
        slots = 1 + number // len(SHAPES) % 2
        domain = 2 if ranks in (4, 6) and rng.random() < 0.2 else ranks
        topology = Topology(ranks=ranks, experts=experts, slots=slots, domain=domain)
        yield SmallCase(shape, topology, _loads(shape, topology, rng))


def _loads(shape: str, topology: Topology, rng: np.random.Generator) -> IntArray:
    """[E] rows; "rank-skewed" and "many small" multiply whole ranks by a factor."""
    experts = topology.experts
    if shape == "uniform":
        return rng.integers(0, 1000, experts)
    if shape == "few tokens":
        return rng.integers(0, 12, experts)
    popularity = rng.lognormal(0.0, 0.2 if shape == "many small" else 1.0, experts)
    if shape in ("rank-skewed", "many small"):
        popularity *= rng.lognormal(0.0, 1.0, topology.ranks)[topology.home_of_expert]
    if shape == "hot few":
        popularity *= np.where(rng.random(experts) < 0.3, 20.0, 1.0)
    tokens = 500 * topology.ranks
    loads: IntArray = np.floor(popularity / popularity.sum() * tokens).astype(np.int64)
    return loads
