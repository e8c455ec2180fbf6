"""The least peak that moves along a fixed graph can reach, in whole tokens.

Tokens move from the sources of edges to their hosts, and back. A threshold rises from the mean:
ranks above it send along a shortest path to a rank below it. When no path is left, no other moves
can bring the ranks that were reached below their own mean, which is the next threshold; so the
last one is the optimum.

Shapes: S microbatches, R ranks, D edges.
"""

from __future__ import annotations

import numpy as np

from ultraep.arrays import IntArray

Steps = list[list[tuple[int, int, int]]]  # by rank: number of a step, its partner, where it leads


def level(rank_SR: IntArray, source_D: IntArray, host_D: IntArray, limit_SD: IntArray) -> IntArray:
    """[S, D] tokens to move along every edge so that the fullest rank has least.

    rank_SR: tokens of every rank before.
    limit_SD: most tokens for every edge.

    >>> level(np.array([[9, 0, 0]]), np.array([0, 1]), np.array([1, 2]), np.array([[9, 2]]))
    array([[5, 2]])
    """
    edges = len(source_D)
    steps: Steps = [[] for _ in range(rank_SR.shape[1])]
    for edge, (source, host) in enumerate(zip(source_D.tolist(), host_D.tolist(), strict=True)):
        steps[source].append((edge, edges + edge, host))
    for edge, (source, host) in enumerate(zip(source_D.tolist(), host_D.tolist(), strict=True)):
        steps[host].append((edges + edge, edge, source))
    moved_SD = np.empty_like(limit_SD)
    for moved_D, loads, limits in zip(moved_SD, rank_SR.tolist(), limit_SD.tolist(), strict=True):
        room = limits + [0] * edges  # of every step; backwards it is what was moved
        _level(loads, room, steps)
        moved_D[:] = room[edges:]
    return moved_SD


def _level(loads: list[int], room: list[int], steps: Steps) -> None:
    threshold = -(-sum(loads) // len(loads))
    while max(loads) > threshold:
        path, reached = _path(loads, room, steps, threshold)
        if not path:
            threshold = -(-sum(loads[rank] for rank in reached) // len(reached))
            continue
        begin, end = path[0][0], path[-1][3]
        tokens = min(loads[begin] - threshold, threshold - loads[end])
        tokens = min(tokens, *(room[step] for _, step, _, _ in path))
        loads[begin] -= tokens
        loads[end] += tokens
        for _, step, partner, _ in path:
            room[step] -= tokens
            room[partner] += tokens


def _path(
    loads: list[int], room: list[int], steps: Steps, threshold: int
) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """Steps from a rank above the threshold to the nearest one below, and the ranks in reach."""
    reached = [rank for rank, load in enumerate(loads) if load > threshold]
    came_by: dict[int, tuple[int, int, int, int] | None] = dict.fromkeys(reached)
    for rank in reached:  # grows while it is walked
        for step, partner, end in steps[rank]:
            if end in came_by or not room[step]:
                continue
            came_by[end] = (rank, step, partner, end)
            if loads[end] < threshold:
                return _back(end, came_by), reached
            reached.append(end)
    return [], reached


def _back(
    end: int, came_by: dict[int, tuple[int, int, int, int] | None]
) -> list[tuple[int, int, int, int]]:
    path = []
    while (taken := came_by[end]) is not None:
        path.append(taken)
        end = taken[0]
    return path[::-1]
