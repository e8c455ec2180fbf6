"""Twin of `reference/level.py`, where the threshold and the paths are explained.

A step is an edge taken forward, or with D added to its number, backward. `room` says what each can
still take.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from ultraep.arrays import IntArray

UNSEEN, START = -2, -1
NO_WAY, LEVEL = -2, -1


class Graph(NamedTuple):
    """The steps between ranks."""

    begin: IntArray  # [2 D] the rank that a step leaves
    end: IntArray  # [2 D] the rank that it leads to
    order: IntArray  # [2 D] the steps by the rank that they leave
    first: IntArray  # [R + 1] where each rank begins in `order`


def level(rank_SR, source_D, host_D, limit_SD):
    """[S, D] tokens to move along every edge so that the fullest rank has least."""
    limit_SD = np.ascontiguousarray(limit_SD)
    return _level_all(rank_SR.copy(), limit_SD, _graph(source_D, host_D, rank_SR.shape[1]))


def _graph(source_D, host_D, ranks):
    begin, end = np.concatenate([source_D, host_D]), np.concatenate([host_D, source_D])
    order = np.argsort(begin, kind="stable")
    return Graph(begin, end, order, np.searchsorted(begin[order], np.arange(ranks + 1)))


@njit(cache=True)
def _level_all(load_SR, limit_SD, graph):
    microbatches, edges = limit_SD.shape
    room_ST = np.zeros((microbatches, 2 * edges), np.int64)  # by step: what it can still take
    for microbatch in range(microbatches):
        for edge in range(edges):  # numba takes seconds to compile an assignment to a slice
            room_ST[microbatch, edge] = limit_SD[microbatch, edge]
        _level(load_SR[microbatch], room_ST[microbatch], graph)
    return room_ST[:, edges:]


@njit(cache=True)
def _level(load_R, room_T, graph):
    threshold = -(-load_R.sum() // len(load_R))
    via_R = np.empty_like(load_R)
    while True:
        end = _search(load_R, room_T, graph, threshold, via_R)
        if end == LEVEL:
            return
        if end == NO_WAY:
            reached = via_R != UNSEEN
            threshold = -(-load_R[reached].sum() // reached.sum())
        else:
            _push(load_R, room_T, graph, threshold, via_R, end)


@njit(cache=True)
def _search(load_R, room_T, graph, threshold, via_R):
    """The nearest rank below the threshold that one above it can send to, and the steps there."""
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
                    return end
                queue[seen] = end
                seen += 1
    return NO_WAY


@njit(cache=True)
def _push(load_R, room_T, graph, threshold, via_R, end):
    """As much as all steps and both ends allow."""
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
