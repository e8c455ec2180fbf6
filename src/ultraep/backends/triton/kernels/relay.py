"""Twin of `replicate.hops`: who hands which expert to whom, from a plan on the device.

Every rank writes a schedule of its own: the hops it sends, who fills its slots, and where the
copies of its home experts are. Copies are compared with all others at once, tile by tile.

    [0] hops sent   [1] chunks   [2] fill   [3] longest chain
    [4..)           hops [C, 4]: source (home expert i: i; spare slot s: -1 - s), receiver,
                    its slot, depth; by depth
    then            senders [slots]: who fills each slot of this rank; -1: nobody
    then            copies [C, 2]: host rank and slot, in the order of the plan
    then            first copy and end [H, 2] of every home expert of this rank

Shapes: C copies at most, B copies of a tile.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.signals import LAST_FILL, board_of

CHUNKS, FILL, LONGEST = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
HEADER = tl.constexpr(4)
DIRECT, CHAIN, AUTO = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NEVER = tl.constexpr(2**30)


@triton.jit
def copies_at(replicas, home_of_expert, at, copies):
    """Expert, home, host and slot of these copies; experts behind the last are -1."""
    there = at < copies
    expert = tl.load(replicas + 3 * at, mask=there, other=-1)
    there = expert >= 0
    home = tl.load(home_of_expert + expert, mask=there, other=-1)
    host = tl.load(replicas + 3 * at + 1, mask=there, other=-2)
    slot = tl.load(replicas + 3 * at + 2, mask=there, other=0)
    return tl.where(there, expert, -1), home, host, slot


@triton.jit
def stand_in_row(
    replicas, home_of_expert, scratch, copies, ranks, slots, C: tl.constexpr, B: tl.constexpr
):
    """Place of every copy in its chain, who stands before it, and whether it is the last.

    Ranks that have experts of their own to send come last. Returns the longest chain.
    """
    all_C = tl.arange(0, C)
    expert_C, home_C, _host_C, _slot_C = copies_at(replicas, home_of_expert, all_C, copies)
    longest = 0
    for begin in range(0, C, B):
        at = begin + tl.arange(0, B)
        _expert, _home, host, slot = copies_at(replicas, home_of_expert, at, copies)
        sends = tl.max((home_C[None, :] == host[:, None]).to(tl.int32), 1)
        key = (sends * ranks + host) * slots + slot
        tl.store(scratch + at, key, mask=at < copies)
    tl.debug_barrier()
    key_C = tl.load(scratch + all_C, mask=all_C < copies, other=0)
    for begin in range(0, C, B):
        at = begin + tl.arange(0, B)
        expert = copies_at(replicas, home_of_expert, at, copies)[0]
        key = tl.load(scratch + at, mask=at < copies, other=0)
        alike = (expert_C[None, :] == expert[:, None]) & (expert >= 0)[:, None]
        before = alike & (key_C[None, :] < key[:, None])
        depth = tl.sum(before.to(tl.int32), 1)
        length = tl.sum(alike.to(tl.int32), 1)
        previous = tl.max(tl.where(before, key_C[None, :], -1), 1)
        tl.store(scratch + copies + at, depth, mask=at < copies)
        tl.store(scratch + 2 * copies + at, previous, mask=at < copies)
        tl.store(scratch + 3 * copies + at, (depth == length - 1).to(tl.int32), mask=at < copies)
        longest = tl.maximum(longest, tl.max(length, 0))
    tl.debug_barrier()
    return longest


@triton.jit
def most_sent(replicas, home_of_expert, scratch, copies, C: tl.constexpr, B: tl.constexpr):
    """Hops that the busiest rank sends, if homes send all themselves, and in chains."""
    all_C = tl.arange(0, C)
    expert_C, home_C, host_C, _slot_C = copies_at(replicas, home_of_expert, all_C, copies)
    there_C = expert_C >= 0
    first_C = there_C & (tl.load(scratch + copies + all_C, mask=there_C, other=1) == 0)
    passes_C = there_C & (tl.load(scratch + 3 * copies + all_C, mask=there_C, other=1) == 0)
    direct, chain = 0, 0
    for begin in range(0, C, B):
        at = begin + tl.arange(0, B)
        expert, home, host, _slot = copies_at(replicas, home_of_expert, at, copies)
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
def write_hops(
    hops,
    source_C,
    sender_C,
    host_C,
    slot_C,
    depth_C,
    scratch,
    rank,
    copies,
    C: tl.constexpr,
    B: tl.constexpr,
):
    """The hops that this rank sends, by depth, then in the order of the plan; their number."""
    all_C = tl.arange(0, C)
    mine_C = sender_C == rank
    key_C = tl.where(mine_C, depth_C * C + all_C, NEVER)
    tl.store(scratch + all_C, key_C, mask=all_C < copies)
    tl.debug_barrier()
    for begin in range(0, C, B):
        at = begin + tl.arange(0, B)
        key = tl.load(scratch + at, mask=at < copies, other=NEVER)
        place = tl.sum((key_C[None, :] < key[:, None]).to(tl.int32), 1)
        tl.store(scratch + copies + at, place, mask=at < copies)
    tl.debug_barrier()
    place_C = tl.load(scratch + copies + all_C, mask=mine_C, other=0)
    tl.store(hops + 4 * place_C, source_C, mask=mine_C)
    tl.store(hops + 4 * place_C + 1, host_C, mask=mine_C)
    tl.store(hops + 4 * place_C + 2, slot_C, mask=mine_C)
    tl.store(hops + 4 * place_C + 3, depth_C, mask=mine_C)
    return tl.sum(mine_C.to(tl.int32), 0)


@triton.jit
def write_places(
    senders,
    where_copies,
    of_homes,
    index_C,
    sender_C,
    host_C,
    slot_C,
    rank,
    slots,
    homes,
    copies,
    C: tl.constexpr,
    H: tl.constexpr,
):
    """Who fills the slots of this rank, where all copies are, and those of its home experts."""
    all_C, home = tl.arange(0, C), tl.arange(0, H)
    for slot in range(slots):
        here_C = (host_C == rank) & (slot_C == slot)
        tl.store(senders + slot, tl.max(tl.where(here_C, sender_C, -1), 0))
    tl.store(where_copies + 2 * all_C, host_C, mask=all_C < copies)
    tl.store(where_copies + 2 * all_C + 1, slot_C, mask=all_C < copies)
    of_home = home[:, None] == index_C[None, :]
    count = tl.sum(of_home.to(tl.int32), 1)
    first = tl.min(tl.where(of_home, all_C[None, :], NEVER), 1)
    first = tl.where(count > 0, first, 0)
    tl.store(of_homes + 2 * home, first, mask=home < homes)
    tl.store(of_homes + 2 * home + 1, first + count, mask=home < homes)


@triton.jit(do_not_specialize=["rank", "ranks", "slots", "homes", "copies", "channel"])
def make_schedule(
    boards,
    replicas,
    home_of_expert,
    home_slot_of_expert,
    first_slot_of_rank,
    chunks_of_length,
    made,
    scratch,
    rank,
    ranks,
    slots,
    homes,
    copies,
    channel,
    MODE: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
):
    """One program: the schedule of this rank is `made`, with a number of its own."""
    all_C = tl.arange(0, C)
    longest = stand_in_row(replicas, home_of_expert, scratch, copies, ranks, slots, C, B)
    chained = longest > 1
    if MODE == DIRECT:
        chained = longest < 0
    if MODE == AUTO:
        chunks = tl.load(chunks_of_length + longest)
        direct, chain = most_sent(replicas, home_of_expert, scratch, copies, C, B)
        chained = chain * chunks + tl.maximum(longest - 1, 0) < direct * chunks
    longest = tl.where(chained, longest, tl.minimum(longest, 1))

    expert_C, home_C, host_C, slot_C = copies_at(replicas, home_of_expert, all_C, copies)
    there_C = expert_C >= 0
    depth_C = tl.load(scratch + copies + all_C, mask=there_C, other=0)
    before_C = tl.load(scratch + 2 * copies + all_C, mask=there_C, other=0)
    index_C = tl.load(home_slot_of_expert + expert_C, mask=there_C, other=0)
    index_C -= tl.load(first_slot_of_rank + rank)
    relayed_C = there_C & (depth_C > 0) & (tl.where(chained, 1, 0) != 0)
    source_C = tl.where(relayed_C, -1 - before_C % slots, index_C)
    sender_C = tl.where(relayed_C, (before_C // slots) % ranks, home_C)
    depth_C = tl.where(relayed_C, depth_C, 0)
    index_C = tl.where(there_C & (home_C == rank), index_C, -1)
    tl.debug_barrier()

    hops = made + HEADER
    senders = hops + 4 * copies
    where_copies = senders + slots
    sent = write_hops(
        hops, source_C, sender_C, host_C, slot_C, depth_C, scratch, rank, copies, C, B
    )
    write_places(
        senders,
        where_copies,
        where_copies + 2 * copies,
        index_C,
        sender_C,
        host_C,
        slot_C,
        rank,
        slots,
        homes,
        copies,
        C,
        H,
    )
    board = board_of(boards, rank)
    fill = tl.load(board + channel + LAST_FILL) + 1
    tl.store(board + channel + LAST_FILL, fill)
    tl.store(made, sent)
    tl.store(made + CHUNKS, tl.load(chunks_of_length + longest))
    tl.store(made + FILL, fill)
    tl.store(made + LONGEST, longest)
