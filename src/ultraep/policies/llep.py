"""LLEP: what does not fit at home spills, heaviest expert first, to the least loaded rank.

Source: least-loaded expert parallelism (LLEP, Salesforce, 2026). On the exact load of every batch,
the heaviest expert first: its home takes what fits under alpha times the mean, the rest goes, with
a copy of the weights, to the rank with the least load, counting what is assigned and what is still
pending there. There are no spare slots: a rank holds as many copies as it is given.

Assigned and pending load are one number here: it starts as the load of the home experts and only
changes when tokens spill. alpha is `1 + tolerance`. Ours leaves out the switch that keeps plain
expert parallelism below an imbalance of 1.3. A rest below `min_tokens_per_replica` stays at home;
`max_replicas` is refused. Copies ignore slots and domains.

Shapes: R ranks.
"""

from __future__ import annotations

import numpy as np

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy
from ultraep.policies.limits import allowed_load, refuse_limits


@register_policy("llep", within_limits=False)
def llep(problem: Problem) -> IntArray:
    """Least-loaded expert parallelism: the heaviest expert spills to the emptiest rank."""
    topology, config, loads_E = problem.topology, problem.config, problem.expert_loads
    refuse_limits(config, "max_replicas")
    homes_E = topology.home_of_expert
    load_R = np.zeros(topology.ranks, dtype=np.int64)
    np.add.at(load_R, homes_E, loads_E)
    allowed = allowed_load(int(loads_E.sum()), topology.ranks, config.tolerance_parts)
    copies = []
    for expert in np.argsort(-loads_E, kind="stable").tolist():
        home = homes_E[expert]
        spill = min(int(loads_E[expert]), int(load_R[home]) - allowed)
        while spill > 0:
            host = int(load_R.argmin())
            quota = min(spill, allowed - int(load_R[host]))
            if quota < config.min_tokens_per_replica:
                break
            copies.append((expert, host, quota))
            load_R[home] -= quota
            load_R[host] += quota
            spill -= quota
    return np.array(copies, dtype=np.int64).reshape(-1, 3)
