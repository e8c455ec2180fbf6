"""LLEP: rows that do not fit at home go to the least loaded rank, heaviest expert first.

Source: least-loaded expert parallelism (LLEP, Salesforce, 2026), by the exact load. The home takes
what fits under alpha times the mean. The rest goes to replicas on the ranks with the least load. A
rank takes no piece below a floor unless it is the last piece. Rows that find no rank go to the
least loaded one, above the cap. The load of a rank includes its home experts that are still to be
placed. There are no spare slots.

alpha is `1 + tolerance` and the floor `min_tokens_per_replica`. The cap is cut to an integer in
double precision, as in the original. The original's switch to plain expert parallelism below some
imbalance, off by default, is left out.

Shapes: R ranks, E experts, C replicas.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy
from ultraep.topology import sum_by_rank
from ultraep_tools.baselines.places import refuse_limits


@register_policy("llep", within_limits=False, offline=True)
def llep(problem: Problem) -> IntArray:
    """Least-loaded expert parallelism: the heaviest expert spills to the emptiest rank."""
    topology, config = problem.topology, problem.config
    refuse_limits(config, "max_replicas")
    return spill_over(
        problem.expert_loads,
        topology.home_of_expert,
        topology.ranks,
        alpha=1 + config.tolerance,
        floor=config.min_tokens_per_replica,
    )


def spill_over(
    loads_E: IntArray, homes_E: IntArray, ranks: int, *, alpha: float = 1.1, floor: int = 1024
) -> IntArray:
    """[C, 3] expert, host and quota of every piece that leaves its home."""
    total = int(loads_E.sum())
    cap = max(1, int(alpha * (total // ranks))) if total >= ranks else total
    load_R = sum_by_rank(loads_E, homes_E, ranks)  # placed, or still pending at home
    quotas: Counter[tuple[int, int]] = Counter()  # by expert and host
    for expert in np.argsort(-loads_E, kind="stable").tolist():
        home, rest = int(homes_E[expert]), int(loads_E[expert])
        load_R[home] -= rest
        at_home = min(max(cap - int(load_R[home]), 0), rest)
        load_R[home] += at_home
        rest -= at_home
        hosts, index = _least_loaded(load_R, home), 0
        while rest:
            last = index == len(hosts)  # no rank may take the rest: the first takes it anyway
            host = hosts[0 if last else index]
            piece = rest if last else min(rest, cap - int(load_R[host]))
            index += 1
            if piece == rest or piece >= max(floor, 1):
                load_R[host] += piece
                quotas[expert, host] += piece
                rest -= piece
                if at_home:  # sort the hosts again after every piece
                    hosts, index = _least_loaded(load_R, home), 0
    placed = [(*pair, quota) for pair, quota in sorted(quotas.items())]
    return np.array(placed, dtype=np.int64).reshape(-1, 3)


def _least_loaded(load_R: IntArray, home: int) -> list[int]:
    """Return the ranks other than `home`, the least loaded first."""
    ranks: list[int] = np.argsort(load_R, kind="stable").tolist()
    ranks.remove(home)
    return ranks
