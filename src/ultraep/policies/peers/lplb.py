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
from typing import NamedTuple

import numpy as np

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy
from ultraep.policies.limits import refuse_limits
from ultraep.policies.places import away_from_home, pack
from ultraep.topology import Topology

DEVICES_PER_NODE = 8

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
    from ultraep.policies.peers.level import level  # numba, where it is used

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
