"""Twin of `hops.hops`: which rank sends which expert to which rank, from a plan on the device.

Every rank writes its own schedule (`schedule.py`). Each tile of B replicas is compared with all
replicas at once. Notes about the replicas are in `scratch`, [4, C]:

    KEY      sort key within its chain: whether its host sends experts of its own, host, slot
    PLACE    how many of its chain precede it
    BEFORE   key of its predecessor
    LAST     whether it is the last one

Shapes: C replicas at most, B replicas of a tile.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels import schedule as layout
from ultraep.backends.triton.kernels.plan import EXPERT, HOST, SLOT, Homes, replica_at
from ultraep.backends.triton.kernels.schedule import CHUNKS, FILL, HOPS, LONGEST, Hop
from ultraep.backends.triton.kernels.signals import LAST_FILL, area_of

DIRECT, CHAIN, AUTO = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NEVER = tl.constexpr(2**30)
KEY, PLACE, BEFORE, LAST = (tl.constexpr(number) for number in range(4))


@triton.jit
def noted(scratch, what: tl.constexpr, replica, max_replicas):
    return scratch + what * max_replicas + replica


@triton.jit
def replicas_at(replicas, homes, at, max_replicas):
    """Return expert, home, host and slot of these replicas; experts behind the last are -1."""
    there = at < max_replicas
    expert = tl.load(replica_at(replicas, at, EXPERT), mask=there, other=-1)
    there = expert >= 0
    home = tl.load(homes.home_of_expert + expert, mask=there, other=-1)
    host = tl.load(replica_at(replicas, at, HOST), mask=there, other=-2)
    slot = tl.load(replica_at(replicas, at, SLOT), mask=there, other=0)
    return tl.where(there, expert, -1), home, host, slot


@triton.jit
def order_chains(
    replicas, homes, scratch, max_replicas, ranks, slots, C: tl.constexpr, B: tl.constexpr
):
    """Write place and predecessor of every replica in its chain, and whether it is the last.

    Ranks that send experts of their own come last. Returns the length of the longest chain.
    """
    all_C = tl.arange(0, C)
    expert_C, home_C, _host_C, _slot_C = replicas_at(replicas, homes, all_C, max_replicas)
    longest = 0
    for begin in range(0, C, B):
        at = begin + tl.arange(0, B)
        _expert, _home, host, slot = replicas_at(replicas, homes, at, max_replicas)
        sends = tl.max((home_C[None, :] == host[:, None]).to(tl.int32), 1)
        key = (sends * ranks + host) * slots + slot
        tl.store(noted(scratch, KEY, at, max_replicas), key, mask=at < max_replicas)
    tl.debug_barrier()
    key_C = tl.load(noted(scratch, KEY, all_C, max_replicas), mask=all_C < max_replicas, other=0)
    for begin in range(0, C, B):
        at = begin + tl.arange(0, B)
        expert = replicas_at(replicas, homes, at, max_replicas)[0]
        key = tl.load(noted(scratch, KEY, at, max_replicas), mask=at < max_replicas, other=0)
        same = (expert_C[None, :] == expert[:, None]) & (expert >= 0)[:, None]
        before = same & (key_C[None, :] < key[:, None])
        place = tl.sum(before.to(tl.int32), 1)
        length = tl.sum(same.to(tl.int32), 1)
        previous = tl.max(tl.where(before, key_C[None, :], -1), 1)
        last = (place == length - 1).to(tl.int32)
        tl.store(noted(scratch, PLACE, at, max_replicas), place, mask=at < max_replicas)
        tl.store(noted(scratch, BEFORE, at, max_replicas), previous, mask=at < max_replicas)
        tl.store(noted(scratch, LAST, at, max_replicas), last, mask=at < max_replicas)
        longest = tl.maximum(longest, tl.max(length, 0))
    tl.debug_barrier()
    return longest


@triton.jit
def most_sent(replicas, homes, scratch, max_replicas, C: tl.constexpr, B: tl.constexpr):
    """Return the hops that the busiest rank sends: if homes send all, and in chains."""
    all_C = tl.arange(0, C)
    expert_C, home_C, host_C, _slot_C = replicas_at(replicas, homes, all_C, max_replicas)
    there_C = expert_C >= 0
    place_C = tl.load(noted(scratch, PLACE, all_C, max_replicas), mask=there_C, other=1)
    last_C = tl.load(noted(scratch, LAST, all_C, max_replicas), mask=there_C, other=1)
    first_C, passes_C = there_C & (place_C == 0), there_C & (last_C == 0)
    direct, chain = 0, 0
    for begin in range(0, C, B):
        at = begin + tl.arange(0, B)
        expert, home, host, _slot = replicas_at(replicas, homes, at, max_replicas)
        from_home = (home_C[None, :] == home[:, None]) & there_C[None, :] & (expert >= 0)[:, None]
        direct = tl.maximum(direct, tl.max(tl.sum(from_home.to(tl.int32), 1), 0))
        relays = (host_C[None, :] == home[:, None]) & passes_C[None, :] & (expert >= 0)[:, None]
        sent = (from_home & first_C[None, :]).to(tl.int32) + relays.to(tl.int32)
        chain = tl.maximum(chain, tl.max(tl.sum(sent, 1), 0))
        own = (home_C[None, :] == host[:, None]) & first_C[None, :] & (expert >= 0)[:, None]
        relays = (host_C[None, :] == host[:, None]) & passes_C[None, :] & (expert >= 0)[:, None]
        sent = own.to(tl.int32) + relays.to(tl.int32)
        chain = tl.maximum(chain, tl.max(tl.sum(sent, 1), 0))
    return direct, chain


@triton.jit
def choose(
    replicas, homes, scratch, chunks_of_length, longest, max_replicas,
    MODE: tl.constexpr, C: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """Return whether experts go in chains; integer version of `hops.choose`."""
    chained = longest > 1
    if MODE == DIRECT:
        chained = longest < 0
    if MODE == AUTO:
        chunks = tl.load(chunks_of_length + longest)
        direct, chain = most_sent(replicas, homes, scratch, max_replicas, C, B)
        chained = chain * chunks + tl.maximum(longest - 1, 0) < direct * chunks
    return chained


@triton.jit
def hops_of(replicas, homes, scratch, chained, rank, ranks, slots, max_replicas, C: tl.constexpr):
    """[C] the hop that fills each replica, and its sender."""
    all_C = tl.arange(0, C)
    expert_C, home_C, host_C, slot_C = replicas_at(replicas, homes, all_C, max_replicas)
    there_C = expert_C >= 0
    place_C = tl.load(noted(scratch, PLACE, all_C, max_replicas), mask=there_C, other=0)
    before_C = tl.load(noted(scratch, BEFORE, all_C, max_replicas), mask=there_C, other=0)
    index_C = tl.load(homes.home_slot_of_expert + expert_C, mask=there_C, other=0)
    index_C -= tl.load(homes.first_slot_of_rank + rank)
    relayed_C = there_C & (place_C > 0) & (tl.where(chained, 1, 0) != 0)
    source_C = tl.where(relayed_C, -1 - before_C % slots, index_C)
    sender_C = tl.where(relayed_C, (before_C // slots) % ranks, home_C)
    depth_C = tl.where(relayed_C, place_C, 0)
    tl.debug_barrier()
    return Hop(source_C, host_C, slot_C, depth_C), sender_C


@triton.jit
def write_hops(
    schedule, hops, sender_C, scratch, rank, max_replicas, C: tl.constexpr, B: tl.constexpr
):
    """Write the hops of this rank by depth, then in plan order; return their number."""
    all_C = tl.arange(0, C)
    mine_C = sender_C == rank
    key_C = tl.where(mine_C, hops.depth * C + all_C, NEVER)
    tl.store(noted(scratch, KEY, all_C, max_replicas), key_C, mask=all_C < max_replicas)
    tl.debug_barrier()
    for begin in range(0, C, B):
        at = begin + tl.arange(0, B)
        key = tl.load(noted(scratch, KEY, at, max_replicas), mask=at < max_replicas, other=NEVER)
        place = tl.sum((key_C[None, :] < key[:, None]).to(tl.int32), 1)
        tl.store(noted(scratch, PLACE, at, max_replicas), place, mask=at < max_replicas)
    tl.debug_barrier()
    place_C = tl.load(noted(scratch, PLACE, all_C, max_replicas), mask=mine_C, other=0)
    layout.store_hops(schedule, place_C, hops, mine_C)
    return tl.sum(mine_C.to(tl.int32), 0)


@triton.jit
def write_senders(schedule, hops, sender_C, rank, slots, max_replicas):
    """Write which rank fills each slot of this rank."""
    for slot in range(slots):
        here_C = (hops.receiver == rank) & (hops.slot == slot)
        sender = tl.max(tl.where(here_C, sender_C, -1), 0)
        tl.store(layout.senders_of(schedule, max_replicas) + slot, sender)


@triton.jit
def write_places(
    schedule,
    replicas,
    homes,
    rank,
    slots,
    num_homes,
    max_replicas,
    C: tl.constexpr,
    H: tl.constexpr,
):
    """Write the places of all replicas, and the spans of this rank's experts."""
    all_C, home = tl.arange(0, C), tl.arange(0, H)
    expert_C, home_C, host_C, slot_C = replicas_at(replicas, homes, all_C, max_replicas)
    mine_C = (expert_C >= 0) & (home_C == rank)
    index_C = tl.load(homes.home_slot_of_expert + expert_C, mask=mine_C, other=0)
    index_C = tl.where(mine_C, index_C - tl.load(homes.first_slot_of_rank + rank), -1)
    places = layout.places_of(schedule, max_replicas, slots)
    layout.store_pair(places, all_C, host_C, slot_C, all_C < max_replicas)
    of_home = home[:, None] == index_C[None, :]
    count = tl.sum(of_home.to(tl.int32), 1)
    first = tl.min(tl.where(of_home, all_C[None, :], NEVER), 1)
    first = tl.where(count > 0, first, 0)
    spans = layout.homes_of(schedule, max_replicas, slots)
    layout.store_pair(spans, home, first, first + count, home < num_homes)


@triton.jit(do_not_specialize=["rank", "ranks", "slots", "num_homes", "max_replicas", "numbering"])
def make_schedule(
    areas,
    replicas,
    homes: Homes,
    chunks_of_length,
    schedule,
    scratch,
    rank,
    ranks,
    slots,
    num_homes,
    max_replicas,
    numbering,
    MODE: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
):
    """Write the schedule of this rank. One program.

    numbering: first word of the channel that counts the fills of all buffers.

    Rank 0 sends its first expert into slot 0 of rank 1, and no rank fills its own slot:

    >>> areas = at([0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0])
    >>> example(make_schedule, 1, areas=areas, replicas=[[0, 1, 0], [-1, -1, -1]],
    ...         chunks_of_length=[1, 1, 2], schedule=empty(21), rank=0, num_homes=2, max_replicas=2,
    ...         numbering=4, MODE=AUTO, B=2)
    areas = [[0, 0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0, 0]]
    schedule = [1, 1, 1, 1, 0, 1, 0, 0, _, _, _, _, -1, 1, 0, -2, 0, 0, 1, 0, 0]
    """
    last_fill = area_of(areas, rank) + numbering + LAST_FILL
    fill = tl.load(last_fill) + 1
    tl.store(last_fill, fill)
    longest = order_chains(replicas, homes, scratch, max_replicas, ranks, slots, C, B)
    chained = choose(replicas, homes, scratch, chunks_of_length, longest, max_replicas, MODE, C, B)
    longest = tl.where(chained, longest, tl.minimum(longest, 1))
    hops, sender_C = hops_of(replicas, homes, scratch, chained, rank, ranks, slots, max_replicas, C)
    sent = write_hops(schedule, hops, sender_C, scratch, rank, max_replicas, C, B)
    write_senders(schedule, hops, sender_C, rank, slots, max_replicas)
    write_places(schedule, replicas, homes, rank, slots, num_homes, max_replicas, C, H)
    tl.store(schedule + HOPS, sent)
    tl.store(schedule + CHUNKS, tl.load(chunks_of_length + longest))
    tl.store(schedule + FILL, fill)
    tl.store(schedule + LONGEST, longest)
