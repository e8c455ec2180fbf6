"""EPLB: experts placed by their past load, and the current load split equally.

Source: DeepSeek's EPLB (2025). From the loads of a past window, the next copy goes, again and
again, to the expert with the largest load per instance. Then the instances are packed, heaviest
first, each on the lightest rank with a free place. Between two such placements nothing adapts:
every instance of an expert gets the same share of its tokens.

An instance is a place that serves an expert, be it the home or a copy. A rank has places for as
many instances as it has home experts and spare slots; homes move freely. In the records an
instance on the home rank is the home and all others are copies, so an expert that moved away has
its whole load in copies. Slots and domains are therefore not kept.

Ours differs in two things: a rank never holds an expert twice, so an instance that would find a
free place only beside another of the same expert is left out; and without any past load
(all zeros) the experts stay at home. Only the flat variant is here, not the one for nodes.
`tolerance` changes nothing, there is nothing to stop early. `min_tokens_per_replica` and
`max_replicas` are refused.

Shapes: R ranks, E experts, N instances, C copies.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy
from ultraep.policies.limits import refuse_limits

BoolArray = NDArray[np.bool_]


@register_policy("eplb", within_limits=False, needs_history=True)
def eplb(problem: Problem) -> IntArray:
    """DeepSeek EPLB: placed by past loads, split equally over the instances."""
    quota_ER = split_equally(problem.expert_loads, place_by_history(problem))
    return as_copies(quota_ER, problem.topology.home_of_expert)


def place_by_history(problem: Problem) -> BoolArray:
    """[E, R] which rank holds an instance of which expert."""
    refuse_limits(problem.config, "min_tokens_per_replica", "max_replicas")
    topology, history_E = problem.topology, problem.history
    assert history_E is not None
    if not history_E.any():
        return np.equal.outer(topology.home_of_expert, np.arange(topology.ranks))
    places_R = topology.homes_per_rank + topology.slots
    instances_E = count_instances(history_E, int(places_R.sum()), topology.ranks)
    return pack(history_E, instances_E, places_R)


def count_instances(history_E: IntArray, places: int, ranks: int) -> IntArray:
    """[E] instances of every expert: the next one to the largest load per instance.

    >>> count_instances(np.array([90, 31, 20]), places=6, ranks=4)
    array([3, 2, 1])
    """
    instances_E = np.ones_like(history_E)
    for _ in range(places - len(history_E)):
        share_E = np.where(instances_E < ranks, history_E / instances_E, -1.0)
        expert = share_E.argmax()
        if share_E[expert] < 0:
            break
        instances_E[expert] += 1
    return instances_E


def pack(history_E: IntArray, instances_E: IntArray, places_R: IntArray) -> BoolArray:
    """[E, R] which rank holds an instance of which expert: the heaviest on the lightest rank."""
    held_ER = np.zeros((len(history_E), len(places_R)), dtype=bool)
    load_R, free_R = np.zeros(len(places_R)), places_R.copy()
    share_E = history_E / instances_E
    expert_N = np.repeat(np.arange(len(history_E)), instances_E)
    for expert in expert_N[np.argsort(-share_E[expert_N], kind="stable")]:
        load_if_open_R = np.where((free_R > 0) & ~held_ER[expert], load_R, np.inf)
        host = load_if_open_R.argmin()
        if np.isinf(load_if_open_R[host]):
            continue  # every rank with a free place holds this expert already
        held_ER[expert, host] = True
        load_R[host] += share_E[expert]
        free_R[host] -= 1
    return held_ER


def split_equally(loads_E: IntArray, held_ER: BoolArray) -> IntArray:
    """[E, R] tokens of every instance: equal shares, the remainder one each to the first ranks.

    >>> split_equally(np.array([5]), np.array([[True, False, True, True]]))
    array([[2, 0, 2, 1]])
    """
    share_E, remainder_E = np.divmod(loads_E, held_ER.sum(axis=1))
    gets_one_more_ER = np.cumsum(held_ER, axis=1) <= remainder_E[:, None]
    quota_ER: IntArray = np.where(held_ER, share_E[:, None] + gets_one_more_ER, 0)
    return quota_ER


def as_copies(quota_ER: IntArray, home_of_expert: IntArray) -> IntArray:
    """[C, 3] expert, host and quota of all tokens that are served away from home."""
    away_ER = quota_ER.copy()
    away_ER[np.arange(len(away_ER)), home_of_expert] = 0
    expert_C, host_C = np.nonzero(away_ER)
    return np.column_stack([expert_C, host_C, away_ER[expert_C, host_C]])
