"""Layout of a schedule: what one rank sends and receives for a plan.

    header   [4]          hops to send, chunks of an expert, number of the fill, longest chain
    hops     [max_replicas, 4]  source (home expert i: i; spare slot s: -1 - s), receiver, its slot,
                          depth in the chain; sorted by depth
    senders  [slots]      rank that fills each slot of this rank; -1: none
    places   [max_replicas, 2]  host rank and slot of every replica, in plan order
    homes    [H, 2]       first and end replica of every home expert of this rank

`max_replicas` and `slots` are upper bounds; the rest is unused.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

HOPS, CHUNKS, FILL, LONGEST = (tl.constexpr(number) for number in range(4))
HEADER = tl.constexpr(4)


class Hop(NamedTuple):
    """One transfer of an expert, or one per element of a tile."""

    source: Any
    receiver: Any
    slot: Any
    depth: Any


@triton.jit
def load_hop(schedule, number):
    at = schedule + HEADER + 4 * number
    return Hop(tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))


@triton.jit
def store_hops(schedule, number, hops, mask):
    at = schedule + HEADER + 4 * number
    tl.store(at, hops.source, mask=mask)
    tl.store(at + 1, hops.receiver, mask=mask)
    tl.store(at + 2, hops.slot, mask=mask)
    tl.store(at + 3, hops.depth, mask=mask)


@triton.jit
def senders_of(schedule, max_replicas):
    return schedule + HEADER + 4 * max_replicas


@triton.jit
def places_of(schedule, max_replicas, slots):
    return senders_of(schedule, max_replicas) + slots


@triton.jit
def homes_of(schedule, max_replicas, slots):
    return places_of(schedule, max_replicas, slots) + 2 * max_replicas


@triton.jit
def load_pair(pairs, index):
    """Return host rank and slot of a replica, or first and end of the replicas of a home expert."""
    return tl.load(pairs + 2 * index), tl.load(pairs + 2 * index + 1)


@triton.jit
def store_pair(pairs, index, first, second, mask):
    tl.store(pairs + 2 * index, first, mask=mask)
    tl.store(pairs + 2 * index + 1, second, mask=mask)
