"""The least peak that moves along a fixed graph can reach, in whole tokens.

Compiled with numba where that is installed.

Shapes: S microbatches, R ranks, D edges, T steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from ultraep.arrays import IntArray

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
