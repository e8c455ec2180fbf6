"""Hops: the way of an expert's weights from its home to its copies, as data.

In mode `direct` the home sends every copy itself. In mode `chain` the copies of an expert stand in
a row, and each passes on what it gets. Mode `auto` takes the one that is done sooner, plan by plan.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

from ultraep.errors import ConfigError
from ultraep.plan import Plan

MODES = ("direct", "chain", "auto")
HOME = -1


class Relay(NamedTuple):
    """How a balancer was told to send weights. mode: one of `MODES`, "": nobody tells."""

    mode: str = ""
    chunks: int = 0  # of an expert in a chain; 0: nobody tells


class Hop(NamedTuple):
    """One rank hands an expert to another."""

    expert: int
    sender: int
    sender_slot: int  # spare slot it is sent from, or HOME
    receiver: int
    slot: int  # spare slot it is received in
    depth: int  # hops before this one


def hops(
    plan: Plan, mode: str, *, chunks: int = 1, skip: set[tuple[int, int]] | None = None
) -> list[Hop]:
    """The hops of a plan, by expert and depth.

    chunks: pieces of an expert in a chain; mode `auto` decides by them.
    skip: slots (host, index) that are filled already.
    """
    if mode not in MODES:
        raise ConfigError(f"unknown relay mode {mode!r}; known are {', '.join(MODES)}")
    mode = choose(plan, chunks, skip) if mode == "auto" else mode
    homes = plan.topology.home_of_expert
    copies: dict[int, list[tuple[int, int]]] = {}
    for expert, host, slot in plan.replicas.tolist():
        if not skip or (host, slot) not in skip:
            copies.setdefault(expert, []).append((host, slot))
    sends = set(homes[list(copies)].tolist())
    found = []
    for expert, places in copies.items():
        sender, sender_slot = int(homes[expert]), HOME
        for depth, (host, slot) in enumerate(sorted(places, key=lambda p: (p[0] in sends, p))):
            chained = mode == "chain"
            found.append(Hop(expert, sender, sender_slot, host, slot, depth if chained else 0))
            if chained:
                sender, sender_slot = host, slot
    return found


def choose(
    plan: Plan, chunks: int, skip: set[tuple[int, int]] | None = None
) -> Literal["direct", "chain"]:
    """The faster mode for what is to be sent; decided by integers, alike on every rank.

    What takes longest is the rank that sends most. A chain of h hops also takes h - 1 chunks of
    time until its last copy gets its first one.
    """
    direct, chain = (hops(plan, mode, skip=skip) for mode in ("direct", "chain"))
    longest = max((hop.depth + 1 for hop in chain), default=0)
    rounds = _most_sent(chain) * chunks + max(0, longest - 1)
    return "chain" if rounds < _most_sent(direct) * chunks else "direct"


def _most_sent(found: list[Hop]) -> int:
    """Hops that the busiest rank sends."""
    return max(Counter(hop.sender for hop in found).values(), default=0)


def copies_sent(plan: Plan, what: str, rank: int) -> int:
    """Replicas whose `weights` or `gradients` a rank sends, by the plan."""
    homes, hosts = plan.topology.home_of_expert[plan.replicas[:, 0]], plan.replicas[:, 1]
    return int(((homes if what == "weights" else hosts) == rank).sum())
