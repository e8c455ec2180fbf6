"""LPLB: homes and one copy per expert by past load, and the current load split optimally over both.

Source: DeepSeek's LPLB (2025). First the homes move: experts are packed on the ranks by past load,
as EPLB packs them, and every rank orders its own by it. Then a fixed graph over the ranks of a
group says whose experts a rank copies: the first places of a neighbour's order. For every batch a
linear program divides the exact load of each expert between its home and its copy so that the
fullest rank of a group gets as little as possible. A hot expert can be halved, not more, which is
why it can lose to EPLB when few experts are very hot.

A group is a fast-link domain. Of the original's graphs the policy takes the torus if the slots are
even in number, for it is the flattest on the loads of `benchmarks/bench_plan.py`, and else the
ring; `CUBE` and `HYPERCUBE` are the two others. Two slots on one edge share a ratio, as there.
Where it can, the packing keeps every block of experts within a node of 8 ranks.

Ours differs in two things. The program is not solved by five steps of an interior-point kernel in
single precision but to its optimum in whole tokens, by flows along the graph. Which of the optimal
splits is taken is not laid down, so quotas differ while the fullest rank is the same. And
homes may be uneven; a place of the graph that has no expert is left out. Homes move, so slots and
domains are not kept and its plans are compared, not run. Without any past load homes stay where
they are. `tolerance` changes nothing. `min_tokens_per_replica` and `max_replicas` are refused.

Shapes: S microbatches, R ranks, E experts, X copies, D edges, C copies that serve tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy
from ultraep.policies.limits import refuse_limits
from ultraep.policies.places import away_from_home, pack
from ultraep.topology import Topology

DEVICES_PER_NODE = 8
UNSEEN, START = -2, -1
NO_PATH, LEVEL = -2, -1

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function with numba, if numba is installed and can write to its cache."""
    try:
        from numba import njit

        return cast(Function, njit(cache=True)(function))
    except (ImportError, RuntimeError):
        return function


Table = list[list[int]]  # [ranks of a group][edges]: whose experts a rank copies

CUBE: Table = [[3, 6], [0, 7], [1, 4], [2, 5], [7, 0], [4, 1], [5, 2], [6, 3]]
HYPERCUBE: Table = [[rank // 4 * 4 + (rank - 1) % 4, (rank - 4) % 16] for rank in range(16)]


class Places(NamedTuple):
    """Where experts live and where their copies stand."""

    home_of_expert: IntArray  # [E] after the move
    expert: IntArray  # [X] edge by edge
    edge: IntArray  # [X]
    source: IntArray  # [D]
    host: IntArray  # [D]


def over_interval(problem: Problem, loads_SE: IntArray) -> IntArray:
    """[C, 4] microbatch, expert, host and quota: one placement, the best split of every load."""
    refuse_limits(problem.config, "min_tokens_per_replica", "max_replicas")
    topology, history_E = problem.topology, problem.history
    assert history_E is not None
    table = graph_of(topology.domain_size, topology.slots)
    places = place_on_graph(history_E, topology, table)
    moved_SX = split(loads_SE, places, topology)
    stay_SE = loads_SE.copy()
    stay_SE[:, places.expert] -= moved_SX  # an expert has one copy at most
    expert_X = np.concatenate([np.arange(topology.experts), places.expert])
    rank_X = np.concatenate([places.home_of_expert, places.host[places.edge]])
    return away_from_home(expert_X, rank_X, np.concatenate([stay_SE, moved_SX], axis=1), topology)


@register_policy("lplb", within_limits=False, needs_history=True, over_interval=over_interval)
def lplb(problem: Problem) -> IntArray:
    """DeepSeek LPLB: homes and one copy per expert on a fixed graph, split by an exact optimum."""
    return over_interval(problem, problem.expert_loads[None])[:, 1:]


def place_on_graph(
    history_E: IntArray,
    topology: Topology,
    table: Table,
    *,
    devices_per_node: int = DEVICES_PER_NODE,
) -> Places:
    """Homes by past load, and copies of every source's first experts along the edges."""
    home_of_expert = move_homes(history_E, topology, devices_per_node)
    own = [_by_past(np.flatnonzero(home_of_expert == r), history_E) for r in range(topology.ranks)]
    width, size = len(table[0]), topology.domain_size
    copied: list[tuple[int, int]] = []
    edges: list[tuple[int, int]] = []
    for host in range(topology.ranks):
        begin = host // size * size
        for edge, source in enumerate(begin + rank for rank in table[host - begin]):
            experts = own[source][: topology.slots][edge::width]
            if source != host and len(experts):
                copied += [(expert, len(edges)) for expert in experts]
                edges.append((source, host))
    expert_X, edge_X = np.array(copied, dtype=np.int64).reshape(-1, 2).T
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


def split(loads_SE: IntArray, places: Places, topology: Topology) -> IntArray:
    """[S, X] tokens of every copy, such that the fullest rank of a group has least."""
    load_SX = loads_SE[:, places.expert]
    first_D = np.searchsorted(places.edge, np.arange(len(places.source)))
    through_SX = np.cumsum(load_SX, axis=1)
    before_SD = (through_SX - load_SX)[:, first_D]
    through_SX -= before_SD[:, places.edge]  # of the copies up to this one, on the same edge
    limit_SD = np.add.reduceat(load_SX, first_D, axis=1) if len(first_D) else load_SX
    rank_SR = _rank_loads(loads_SE, places.home_of_expert, topology.ranks)
    moved_SD = _level_groups(rank_SR, places, limit_SD, topology.domain_size)
    # One ratio for all copies on an edge: what rounding leaves goes to the later ones.
    limit_SX, moved_SX = np.maximum(limit_SD, 1)[:, places.edge], moved_SD[:, places.edge]
    shared: IntArray = moved_SX * through_SX // limit_SX
    shared -= moved_SX * (through_SX - load_SX) // limit_SX
    return shared


def _level_groups(rank_SR: IntArray, places: Places, limit_SD: IntArray, size: int) -> IntArray:
    """[S, D] tokens to move along every edge, each group of ranks for itself."""
    moved_SD = np.zeros_like(limit_SD)
    for begin in range(0, rank_SR.shape[1], size):
        inside = np.flatnonzero(places.source // size == begin // size)
        ends = (places.source[inside] - begin, places.host[inside] - begin)
        own_SR = rank_SR[:, begin : begin + size]
        moved_SD[:, inside] = level(own_SR, *ends, limit_SD[:, inside])
    return moved_SD


def graph_of(size: int, slots: int) -> Table:
    """The graph of a group of so many ranks with so many slots.

    >>> graph_of(3, 1), graph_of(4, 2)
    ([[1], [2], [0]], [[2, 1], [3, 0], [0, 3], [1, 2]])
    """
    columns = max(divisor for divisor in range(1, math.isqrt(size) + 1) if size % divisor == 0)
    if slots % 2 == 0 and columns > 1:
        return torus(size // columns, columns)
    return [[(rank + 1) % size] for rank in range(size)]


def torus(rows: int, columns: int) -> Table:
    """Every rank copies from the next one in its column and the next one in its row."""
    return [
        [(row + 1) % rows * columns + column, row * columns + (column + 1) % columns]
        for row in range(rows)
        for column in range(columns)
    ]


def _by_past(experts: IntArray, history_E: IntArray) -> list[int]:
    order: list[int] = experts[np.argsort(-history_E[experts], kind="stable")].tolist()
    return order


def _rank_loads(loads_SE: IntArray, home_of_expert: IntArray, ranks: int) -> IntArray:
    """[S, R] tokens of every rank, all at home."""
    rank_SR = np.zeros((len(loads_SE), ranks), dtype=np.int64)
    np.add.at(rank_SR.T, home_of_expert, loads_SE.T)
    return rank_SR


class Graph(NamedTuple):
    """The steps between ranks: every edge forward, then every edge backward."""

    begin: IntArray  # [2 D] the rank that a step leaves
    end: IntArray  # [2 D] the rank that it leads to
    order: IntArray  # [2 D] the steps by the rank that they leave
    first: IntArray  # [R + 1] where each rank begins in `order`


def level(rank_SR: IntArray, source_D: IntArray, host_D: IntArray, limit_SD: IntArray) -> IntArray:
    """[S, D] tokens to move along every edge so that the fullest rank has least.

    A threshold rises from the mean: ranks above it send along a shortest path to a rank below it.
    When no path is left, no other moves can bring the ranks that were reached below their own
    mean, which is the next threshold; so the last one is the optimum.

    rank_SR: tokens of every rank before.   limit_SD: most tokens for every edge.

    >>> level(np.array([[9, 0, 0]]), np.array([0, 1]), np.array([1, 2]), np.array([[9, 2]]))
    array([[5, 2]])
    """
    begin, end = np.concatenate([source_D, host_D]), np.concatenate([host_D, source_D])
    order = np.argsort(begin, kind="stable")
    first = np.searchsorted(begin[order], np.arange(rank_SR.shape[1] + 1))
    graph = Graph(begin, end, order, first)
    return _level_all(rank_SR.copy(), np.ascontiguousarray(limit_SD), graph)


@compiled
def _level_all(load_SR: IntArray, limit_SD: IntArray, graph: Graph) -> IntArray:
    microbatches, edges = limit_SD.shape
    room_ST = np.zeros((microbatches, 2 * edges), np.int64)  # by step: what it can still take
    for microbatch in range(microbatches):
        for edge in range(edges):  # numba takes seconds to compile an assignment to a slice
            room_ST[microbatch, edge] = limit_SD[microbatch, edge]
        _level(load_SR[microbatch], room_ST[microbatch], graph)
    return room_ST[:, edges:]


@compiled
def _level(load_R: IntArray, room_T: IntArray, graph: Graph) -> None:
    threshold = -(-load_R.sum() // len(load_R))
    via_R = np.empty_like(load_R)
    while True:
        end = _search(load_R, room_T, graph, threshold, via_R)
        if end == LEVEL:
            return
        if end == NO_PATH:
            reached = via_R != UNSEEN
            threshold = -(-load_R[reached].sum() // reached.sum())
        else:
            _push(load_R, room_T, graph, threshold, via_R, end)


@compiled
def _search(
    load_R: IntArray, room_T: IntArray, graph: Graph, threshold: int, via_R: IntArray
) -> int:
    """The nearest rank below the threshold that one above it can send to; `via_R`: the steps."""
    queue = np.empty_like(via_R)
    seen = 0
    for rank in range(len(load_R)):
        via_R[rank] = UNSEEN
        if load_R[rank] > threshold:
            via_R[rank] = START
            queue[seen] = rank
            seen += 1
    if seen == 0:
        return LEVEL
    turn = 0
    while turn < seen:
        rank = queue[turn]
        turn += 1
        for place in range(graph.first[rank], graph.first[rank + 1]):
            step = graph.order[place]
            end = graph.end[step]
            if via_R[end] == UNSEEN and room_T[step] > 0:
                via_R[end] = step
                if load_R[end] < threshold:
                    return int(end)
                queue[seen] = end
                seen += 1
    return NO_PATH


@compiled
def _push(
    load_R: IntArray, room_T: IntArray, graph: Graph, threshold: int, via_R: IntArray, end: int
) -> None:
    """Move as much as all steps of the path, and both its ends, allow."""
    tokens = threshold - load_R[end]
    rank = end
    while via_R[rank] != START:
        tokens = min(tokens, room_T[via_R[rank]])
        rank = graph.begin[via_R[rank]]
    tokens = min(tokens, load_R[rank] - threshold)
    load_R[rank] -= tokens
    load_R[end] += tokens
    while via_R[end] != START:
        step = via_R[end]
        room_T[step] -= tokens
        room_T[(step + len(room_T) // 2) % len(room_T)] += tokens
        end = graph.begin[step]
