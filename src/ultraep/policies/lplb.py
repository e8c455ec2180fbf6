"""LPLB: a fixed graph of copies, chosen by past load, and the current load split optimally over it.

Source: DeepSeek's LPLB (2025). Every expert has at most one copy; a graph over the ranks (cube,
hypercube, torus) says on which rank. The spare slots of a rank go to the experts of its
neighbours that were the heaviest in the past. For every batch a linear program divides the exact
load of each expert between its home and its copy so that the fullest rank gets as little as
possible. A hot expert can be halved, not more, which is why it can lose to EPLB when few experts
are very hot.

Ours differs in four things. Homes stay where they are; the original first reorders the experts by
past load, as EPLB does. The graph is a torus with as many dimensions as there are spare slots, in
every domain; in small domains some of them are the same, and slots stay empty. The program is not
solved by an interior-point kernel but by letting the two ranks of every copy share evenly, again
and again, until nobody gains: that minimises the sum of squares over all splits, and with it the
fullest rank. In whole tokens two neighbours may end one token apart, and the fullest rank half a
token per rank of its domain above the optimum. And without any past load nothing is copied.
`tolerance` changes nothing. `min_tokens_per_replica` and `max_replicas` are refused.

Shapes: S microbatches, R ranks, E experts, X copies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy
from ultraep.policies.limits import refuse_limits
from ultraep.topology import Topology


class Graph(NamedTuple):
    """Which expert has its copy where, and which copies share no rank with each other."""

    expert: IntArray  # [X]
    home: IntArray  # [X]
    host: IntArray  # [X]
    classes: list[IntArray]  # positions in the above


@register_policy("lplb", needs_history=True)
def lplb(problem: Problem) -> IntArray:
    """DeepSeek LPLB: one copy per expert on a fixed graph, split by an exact optimum."""
    refuse_limits(problem.config, "min_tokens_per_replica", "max_replicas")
    topology, history_E = problem.topology, problem.history
    assert history_E is not None
    graph = place_on_torus(history_E, topology)
    moved_X = share_evenly(problem.expert_loads[None], graph, topology)[0]
    used = moved_X > 0
    return np.column_stack([graph.expert[used], graph.host[used], moved_X[used]])


def place_on_torus(history_E: IntArray, topology: Topology) -> Graph:
    """One copy of the heaviest experts of every rank, each on another neighbour."""
    size = topology.domain_size
    steps = _steps(size, topology.slots)
    found = []
    for rank in range(topology.ranks if history_E.any() else 0):
        begin = rank // size * size
        mine = topology.home_experts(rank)
        heaviest = mine[np.argsort(-history_E[mine], kind="stable")]
        for expert, step in zip(heaviest.tolist(), steps, strict=False):
            found.append((expert, rank, begin + (rank - begin + step) % size))
    expert_X, home_X, host_X = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return Graph(expert_X, home_X, host_X, _classes(home_X.tolist(), host_X.tolist()))


def share_evenly(loads_SE: IntArray, graph: Graph, topology: Topology) -> IntArray:
    """[S, X] tokens of every copy, such that the fullest rank has as little as possible."""
    limit_SX = loads_SE[:, graph.expert]
    moved_SX = np.zeros_like(limit_SX)
    sums = np.zeros((len(loads_SE), topology.experts + 1), dtype=np.int64)
    np.cumsum(loads_SE[:, topology.experts_by_rank], axis=1, out=sums[:, 1:])
    rank_SR = np.diff(sums[:, topology.first_of_rank], axis=1)  # 0 where no expert is at home
    busy = np.arange(len(loads_SE))
    while len(busy):  # every exchange lowers a sum of squares, a whole number: this ends
        moved, rank, limit = moved_SX[busy], rank_SR[busy], limit_SX[busy]
        for chosen in graph.classes:
            home, host, before = graph.home[chosen], graph.host[chosen], moved[:, chosen]
            gap = rank[:, home] - rank[:, host]
            half = np.sign(gap) * (np.abs(gap) // 2)
            after = np.clip(before + half, 0, limit[:, chosen])
            moved[:, chosen] = after
            rank[:, home] -= after - before
            rank[:, host] += after - before
        changed = (moved != moved_SX[busy]).any(axis=1)
        moved_SX[busy], rank_SR[busy] = moved, rank
        busy = busy[changed]
    return moved_SX


def _steps(size: int, slots: int) -> list[int]:
    """How far away the neighbours of a rank are: 1 in a ring, 1 and 8 in a torus of 64.

    >>> _steps(64, 1), _steps(64, 2), _steps(64, 3), _steps(1, 2)
    ([1], [1, 8], [1, 4, 16], [])
    """
    wanted = dict.fromkeys(round(size ** (axis / slots)) for axis in range(slots))
    return [step for step in wanted if step < size]


def _classes(homes: list[int], hosts: list[int]) -> list[IntArray]:
    """Edges by colour: no two of one colour meet at a rank; the first colour that is free."""
    taken: list[set[int]] = []
    members: list[list[int]] = []
    for edge, ends in enumerate(zip(homes, hosts, strict=True)):
        free = next((c for c, ranks in enumerate(taken) if ranks.isdisjoint(ends)), len(taken))
        if free == len(taken):
            taken.append(set())
            members.append([])
        taken[free].update(ends)
        members[free].append(edge)
    return [np.array(edges, dtype=np.int64) for edges in members]
