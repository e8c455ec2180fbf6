"""Hops: how the weights of an expert travel from its home to its replicas.

In mode `direct` the home sends to every replica itself. In mode `chain` each replica of an expert
forwards the weights to the next. Mode `auto` picks the faster mode for each plan.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

from ultraep.config import check_choice
from ultraep.plan import Plan

MODES = ("direct", "chain", "auto")
CHUNKS = 4  # pieces of an expert in a chain of messages
HOME = -1


class Hop(NamedTuple):
    """One transfer of an expert between two ranks."""

    expert: int
    sender: int
    sender_slot: int  # spare slot of the sender, or HOME
    receiver: int
    slot: int  # spare slot of the receiver
    depth: int  # hops before this one


def hops(plan: Plan, mode: str, *, chunks: int = 1) -> list[Hop]:
    """Return the hops of a plan, by expert and depth.

    chunks: pieces of an expert in a chain, for the choice of mode `auto`.
    """
    check_choice("relay", mode, MODES)
    mode = choose(plan, chunks) if mode == "auto" else mode
    homes = plan.topology.home_of_expert
    chained = mode == "chain"
    replicas: dict[int, list[tuple[int, int]]] = {}
    for expert, host, slot in plan.replicas.tolist():
        replicas.setdefault(expert, []).append((host, slot))
    senders = set(homes[list(replicas)].tolist())
    path = []
    for expert, places in replicas.items():
        sender, sender_slot = int(homes[expert]), HOME
        for depth, (host, slot) in enumerate(sorted(places, key=lambda p: (p[0] in senders, p))):
            path.append(Hop(expert, sender, sender_slot, host, slot, depth if chained else 0))
            if chained:
                sender, sender_slot = host, slot
    return path


def choose(plan: Plan, chunks: int) -> Literal["direct", "chain"]:
    """Return the faster mode, decided by integers, so the same on every rank.

    The rank that sends most takes longest. In a chain of h hops, the last replica also waits h - 1
    chunks for its first one.
    """
    direct, chain = (hops(plan, mode) for mode in ("direct", "chain"))
    longest = max((hop.depth + 1 for hop in chain), default=0)
    rounds = _most_sent(chain) * chunks + max(0, longest - 1)
    return "chain" if rounds < _most_sent(direct) * chunks else "direct"


def _most_sent(path: list[Hop]) -> int:
    """Return the number of hops of the rank that sends most."""
    return max(Counter(hop.sender for hop in path).values(), default=0)


def replicas_sent(plan: Plan, what: str, rank: int) -> int:
    """Return how many replicas' `weights` or `gradients` a rank sends by the plan."""
    homes, hosts = plan.topology.home_of_expert[plan.replicas[:, 0]], plan.replicas[:, 1]
    return int(((homes if what == "weights" else hosts) == rank).sum())
