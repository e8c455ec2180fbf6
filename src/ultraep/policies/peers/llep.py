"""LLEP: what does not fit at home spills, heaviest expert first, to the least loaded rank.

Source: least-loaded expert parallelism (LLEP, Salesforce, 2026). On the exact load of every batch,
the heaviest expert first: its home takes what fits under alpha times the mean, the rest goes, with
a copy of the weights, to the ranks with the least load. A piece below a floor is not given to a
rank unless it is all that is left; what finds no rank goes to the least loaded one, above the cap.
There are no spare slots: a rank holds as many copies as it is given.

Load is one number per rank: it starts as that of the home experts and changes when tokens spill.
alpha is `1 + tolerance` and the floor `min_tokens_per_replica`: the original's own settings are
0.1 and 1024, and the cap is alpha times the mean cut to a whole number in double precision, as
there. Since the last piece of an expert may be of any size, the floor is none for every copy. Ours
leaves out the switch that keeps plain expert parallelism below a given imbalance, off unless set
in the original. `max_replicas` is refused. Copies ignore slots and domains.

Shapes: R ranks, E experts, C copies.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ultraep.arrays import IntArray
from ultraep.policies import Problem, register_policy
from ultraep.policies.limits import refuse_limits


@register_policy("llep", within_limits=False)
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
    load_R = np.zeros(ranks, dtype=np.int64)
    np.add.at(load_R, homes_E, loads_E)
    spread = _Spread(load_R, cap, floor, Counter())
    for expert in np.argsort(-loads_E, kind="stable").tolist():
        if loads_E[expert]:
            spread.serve(expert, int(homes_E[expert]), int(loads_E[expert]))
    copies = [(*pair, quota) for pair, quota in sorted(spread.quotas.items())]
    return np.array(copies, dtype=np.int64).reshape(-1, 3)


@dataclass(frozen=True, slots=True)
class _Spread:
    """A plan under construction."""

    loads: IntArray  # [R] assigned, or still pending at home
    cap: int
    floor: int
    quotas: Counter[tuple[int, int]]  # tokens by expert and host

    def serve(self, expert: int, home: int, tokens: int) -> None:
        """Home takes what fits, the others take the rest."""
        self.loads[home] -= tokens
        stay = min(max(self.cap - int(self.loads[home]), 0), tokens)
        self.loads[home] += stay
        if tokens > stay:
            self.spill(expert, home, tokens - stay, anew=stay > 0)

    def spill(self, expert: int, home: int, rest: int, *, anew: bool) -> None:
        """Pieces to the least loaded, who are looked for anew after every piece, or only once."""
        hosts, turn = self.others(home), 0
        while rest and turn < len(hosts):
            piece = self.piece(hosts[turn], rest)
            turn += 1
            if piece:
                self.give(expert, hosts[turn - 1], piece)
                rest -= piece
                if anew:
                    hosts, turn = self.others(home), 0
        if rest:
            self.give(expert, hosts[0], rest)

    def others(self, home: int) -> list[int]:
        """The other ranks, the least loaded first."""
        order: list[int] = np.argsort(self.loads, kind="stable").tolist()
        order.remove(home)
        return order

    def piece(self, host: int, rest: int) -> int:
        """Tokens that the host takes: up to the cap, and not below the floor unless it is all."""
        piece = min(rest, self.cap - int(self.loads[host]))
        return piece if piece == rest or piece >= max(self.floor, 1) else 0

    def give(self, expert: int, host: int, tokens: int) -> None:
        self.loads[host] += tokens
        self.quotas[expert, host] += tokens
