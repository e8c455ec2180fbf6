"""LPLB: homes and one replica per expert by past load; the current load is split optimally.

Source: DeepSeek's LPLB (2025). Experts are packed on ranks by past load, as in EPLB, and every rank
sorts its own by it. A fixed graph over the ranks of a group (a fast-link domain) says whose first
experts a rank replicates. For every batch a linear program divides the load of each expert between
home and replica, to minimise the busiest rank of a group. An expert has at most one replica, so
with few very hot experts LPLB can lose to EPLB.

With an even number of slots the policy uses a torus, the best of the original's graphs on the loads
of `benchmarks/bench_plan.py`, otherwise a ring. Two slots on one edge share a ratio, as in the
original. If possible, the packing keeps every block of experts within a node of 8 ranks.

The original solves the program with five interior-point steps in single precision; here flows along
the graph give the optimum in whole rows. Optimal splits are not unique, so quotas may differ while
the busiest rank is the same. Homes may be uneven; without past load they stay.

Shapes: R ranks, E experts, X replicas, D edges, T steps along edges, C replicas that serve rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy
from ultraep.topology import Topology, sum_by_rank
from ultraep_tools.baselines.places import away_from_home, pack, refuse_limits, remember_last

DEVICES_PER_NODE = 8

Table = list[list[int]]  # [ranks of a group][edges]: the ranks whose experts a rank replicates


class Places(NamedTuple):
    """Homes and replicas of experts."""

    home_of_expert: IntArray  # [E] after the move
    expert: IntArray  # [X] edge by edge
    edge: IntArray  # [X]
    source: IntArray  # [D]
    host: IntArray  # [D]


@register_policy("lplb", within_limits=False, needs_history=True, offline=True)
def lplb(problem: Problem) -> IntArray:
    """DeepSeek LPLB: homes and one replica per expert on a fixed graph, split optimally."""
    refuse_limits(problem.config, "min_tokens_per_replica", "max_replicas")
    topology, loads_E = problem.topology, problem.expert_loads
    assert problem.history is not None
    places = place_by_past(problem.history, topology)
    moved_X = split(loads_E, places, topology)
    stay_E = loads_E.copy()
    stay_E[places.expert] -= moved_X  # an expert has at most one replica
    expert_X = np.concatenate([np.arange(topology.experts), places.expert])
    rank_X = np.concatenate([places.home_of_expert, places.host[places.edge]])
    return away_from_home(expert_X, rank_X, np.concatenate([stay_E, moved_X]), topology)


# -- placement -----------------------------------------------------------------------------------


def graph_of(size: int, slots: int) -> Table:
    """Return the graph of a group of `size` ranks with `slots` slots each.

    >>> graph_of(3, 1), graph_of(4, 2)
    ([[1], [2], [0]], [[2, 1], [3, 0], [0, 3], [1, 2]])
    """
    columns = max(divisor for divisor in range(1, math.isqrt(size) + 1) if size % divisor == 0)
    if slots % 2 == 0 and columns > 1:
        return torus(size // columns, columns)
    return [[(rank + 1) % size] for rank in range(size)]


def torus(rows: int, columns: int) -> Table:
    """Every rank replicates from the next rank in its column and the next in its row."""
    return [
        [(row + 1) % rows * columns + column, row * columns + (column + 1) % columns]
        for row in range(rows)
        for column in range(columns)
    ]


@remember_last
def place_by_past(history_E: IntArray, topology: Topology) -> Places:
    """Place homes and replicas on the graph of the topology."""
    return place_on_graph(history_E, topology, graph_of(topology.domain_size, topology.slots))


def place_on_graph(
    history_E: IntArray,
    topology: Topology,
    table: Table,
    *,
    devices_per_node: int = DEVICES_PER_NODE,
) -> Places:
    """Place homes by past load, and replicas of every source's first experts along the edges."""
    home_of_expert = move_homes(history_E, topology, devices_per_node)
    by_past = np.argsort(-history_E, kind="stable")
    own = [by_past[home_of_expert[by_past] == rank].tolist() for rank in range(topology.ranks)]
    width, size = len(table[0]), topology.domain_size
    replicas: list[tuple[int, int]] = []
    edges: list[tuple[int, int]] = []
    for host in range(topology.ranks):
        begin = host // size * size
        for column, source in enumerate(begin + rank for rank in table[host - begin]):
            experts = own[source][: topology.slots][column::width]
            if source != host and experts:
                replicas += [(expert, len(edges)) for expert in experts]
                edges.append((source, host))
    expert_X, edge_X = np.array(replicas, dtype=np.int64).reshape(-1, 2).T
    return Places(home_of_expert, expert_X, edge_X, *np.array(edges, np.int64).reshape(-1, 2).T)


def move_homes(history_E: IntArray, topology: Topology, devices_per_node: int) -> IntArray:
    """[E] homes by past load: equally many on every rank, blocks of experts within a node."""
    if not history_E.any():
        return topology.home_of_expert
    past_E, places_R = history_E.astype(np.float32), topology.homes_per_rank
    groups, nodes = topology.num_domains, max(1, topology.ranks // devices_per_node)
    if groups % nodes or (places_R != places_R[0]).any():
        return pack(past_E, places_R)
    block_of_expert = np.arange(topology.experts) // (topology.experts // groups)
    block_loads = past_E.reshape(groups, -1).sum(axis=1)
    node_of_expert = pack(block_loads, np.full(nodes, groups // nodes))[block_of_expert]
    home_of_expert = np.empty(topology.experts, dtype=np.int64)
    ranks = topology.ranks // nodes
    for node in range(nodes):
        own = np.flatnonzero(node_of_expert == node)
        home_of_expert[own] = node * ranks + pack(past_E[own], places_R[:ranks])
    return home_of_expert


# -- split ---------------------------------------------------------------------------------------


def split(loads_E: IntArray, places: Places, topology: Topology) -> IntArray:
    """[X] rows of every replica that minimise the busiest rank of every group."""
    load_X = loads_E[places.expert]
    limit_D = sum_by_rank(load_X, places.edge, len(places.source))
    rank_R = sum_by_rank(loads_E, places.home_of_expert, topology.ranks)
    moved_D: IntArray = np.zeros_like(limit_D)
    size = topology.domain_size
    for begin in range(0, topology.ranks, size):
        inside = np.flatnonzero(places.source // size == begin // size)
        ends = (places.source[inside] - begin, places.host[inside] - begin)
        moved_D[inside] = level(rank_R[begin : begin + size], *ends, limit_D[inside])
    # One ratio for all replicas on an edge. The later ones get the remainder.
    before_D: IntArray = np.cumsum(limit_D) - limit_D
    through_X: IntArray = np.cumsum(load_X) - before_D[places.edge]  # to this one, on its edge
    limit_X, moved_X = np.maximum(limit_D, 1)[places.edge], moved_D[places.edge]
    shared: IntArray = moved_X * through_X // limit_X
    shared -= moved_X * (through_X - load_X) // limit_X
    return shared


def level(rank_R: IntArray, source_D: IntArray, host_D: IntArray, limit_D: IntArray) -> IntArray:
    """[D] rows to move along every edge so that the busiest rank has the fewest rows.

    A threshold rises from the mean: ranks above it send along a path to a rank below it. When no
    path is left, no moves can bring the ranks that were reached below their own mean, which is
    the next threshold. So the last threshold is the optimum.

    rank_R: rows of every rank before.   limit_D: most rows for every edge.

    >>> level(np.array([9, 0, 0]), np.array([0, 1]), np.array([1, 2]), np.array([9, 2]))
    array([5, 2])
    """
    begin_T, end_T = np.concatenate([source_D, host_D]), np.concatenate([host_D, source_D])
    residual_T = np.concatenate([limit_D, np.zeros_like(limit_D)])
    _level(rank_R.copy(), residual_T, begin_T, end_T)
    return residual_T[len(source_D) :]


UNSEEN, START, NO_PATH = -2, -1, -1

Function = TypeVar("Function", bound=Callable[..., Any])


def _compiled(function: Function) -> Function:
    """Compile a function with numba, if it is installed and can write its cache."""
    try:
        from numba import njit

        return cast(Function, njit(cache=True)(function))
    except (ImportError, RuntimeError):
        return function


@_compiled
def _search(
    via_R: IntArray,
    load_R: IntArray,
    threshold: int,
    residual_T: IntArray,
    begin_T: IntArray,
    end_T: IntArray,
) -> int:
    """Return a rank below the threshold that a rank above it can send to.

    Steps go along every edge forward, then along every edge backward.
    via_R: filled with the step that leads to each rank.
    """
    for rank in range(len(load_R)):
        via_R[rank] = START if load_R[rank] > threshold else UNSEEN
    spreads = True
    while spreads:
        spreads = False
        for step in range(len(begin_T)):
            end = end_T[step]
            if residual_T[step] > 0 and via_R[begin_T[step]] != UNSEEN and via_R[end] == UNSEEN:
                via_R[end], spreads = step, True
                if load_R[end] < threshold:
                    return int(end)
    return NO_PATH


@_compiled
def _level(load_R: IntArray, residual_T: IntArray, begin_T: IntArray, end_T: IntArray) -> None:
    """Move rows until no rank is above the threshold; update loads and rows that steps can take."""
    threshold = -(-load_R.sum() // len(load_R))
    via_R = np.empty_like(load_R)
    while load_R.max() > threshold:
        end = _search(via_R, load_R, threshold, residual_T, begin_T, end_T)
        if end == NO_PATH:
            reached_R = via_R != UNSEEN
            threshold = -(-load_R[reached_R].sum() // reached_R.sum())
            continue
        rows, rank = threshold - load_R[end], end
        while via_R[rank] != START:
            rows = min(rows, residual_T[via_R[rank]])
            rank = begin_T[via_R[rank]]
        rows = min(rows, load_R[rank] - threshold)
        load_R[rank] -= rows
        load_R[end] += rows
        while via_R[end] != START:
            step = via_R[end]
            residual_T[step] -= rows
            residual_T[(step + len(residual_T) // 2) % len(residual_T)] += rows
            end = begin_T[step]
