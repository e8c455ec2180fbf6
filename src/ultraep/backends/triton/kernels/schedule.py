"""Layout of a schedule: what one rank has to do for a plan, as numbers on the device.

    header   [4]          hops that are sent, chunks of an expert, number of the fill, longest chain
    hops     [copies, 4]  source (home expert i: i; spare slot s: -1 - s), receiver, its slot,
                          depth in the chain; by depth
    senders  [slots]      who fills each slot of this rank; -1: nobody
    places   [copies, 2]  host rank and slot of every copy, in the order of the plan
    homes    [H, 2]       first and end among those, of every home expert of this rank

`copies` and `slots` are the most that there can be: what is not used stands free.
"""

import triton
import triton.language as tl

HOPS, CHUNKS, FILL, LONGEST = (tl.constexpr(number) for number in range(4))
HEADER = tl.constexpr(4)
SOURCE, RECEIVER, TO_SLOT, DEPTH = (tl.constexpr(number) for number in range(4))


@triton.jit
def hop_at(schedule, number, column: tl.constexpr):
    return schedule + HEADER + 4 * number + column


@triton.jit
def senders_of(schedule, copies):
    return schedule + HEADER + 4 * copies


@triton.jit
def places_of(schedule, copies, slots):
    return senders_of(schedule, copies) + slots


@triton.jit
def load_place(places, copy):
    """Host rank and slot of a copy."""
    return tl.load(places + 2 * copy), tl.load(places + 2 * copy + 1)


@triton.jit
def store_place(places, copy, host, slot, mask):
    tl.store(places + 2 * copy, host, mask=mask)
    tl.store(places + 2 * copy + 1, slot, mask=mask)


@triton.jit
def homes_of(schedule, copies, slots):
    return places_of(schedule, copies, slots) + 2 * copies


@triton.jit
def load_span(homes, home):
    """First and end of the copies of a home expert."""
    return tl.load(homes + 2 * home), tl.load(homes + 2 * home + 1)


@triton.jit
def store_span(homes, home, first, end, mask):
    tl.store(homes + 2 * home, first, mask=mask)
    tl.store(homes + 2 * home + 1, end, mask=mask)
