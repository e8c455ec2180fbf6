"""What an attempt costs: copies, the most of one expert, the busiest ranks; and which is best."""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.state import (
    COPIES,
    EGRESS,
    FANOUT,
    PEAK,
    SLACK,
    THRESHOLD,
    fact_of,
    measure_of,
)


@triton.jit
def weigh(
    hosted, counts, ranks, slots, H: tl.constexpr, G: tl.constexpr, HELD: tl.constexpr
):  # fmt: skip
    """Most copies of one expert, and most experts that one rank gives away.

    counts: room for H * G numbers.
    """
    place = tl.arange(0, H * G)
    tl.store(counts + place, place * 0)
    slot = tl.arange(0, HELD)
    tl.debug_barrier()  # the attempt is written, too
    place_of_slot = tl.load(hosted + slot, mask=slot < ranks * slots, other=-1)
    tl.atomic_add(counts + place_of_slot, 1, mask=place_of_slot >= 0, sem="relaxed")
    tl.debug_barrier()
    rank = tl.arange(0, G)
    at_HG = tl.arange(0, H)[:, None] * G + rank[None, :]
    copies_HG = tl.load(counts + at_HG, cache_modifier=".cg")
    fanout = tl.max(tl.max(copies_HG, 0), 0)
    return fanout, tl.max(tl.sum((copies_HG > 0).to(tl.int32), 0), 0)


@triton.jit
def received_by(hosted, ranks, slots, G: tl.constexpr):
    """[G] copies that every rank receives."""
    rank = tl.arange(0, G)
    received_G = rank * 0
    for index in range(slots):
        at_G = hosted + rank * slots + index
        received_G += (tl.load(at_G, mask=rank < ranks, other=-1) >= 0).to(tl.int32)
    return received_G


@triton.jit
def note(
    facts, hosted, counts, load_G, made, domain, member, ranks, slots,
    H: tl.constexpr, G: tl.constexpr, HELD: tl.constexpr, MEMBERS: tl.constexpr
):  # fmt: skip
    """The measures of a member's attempt, among the facts."""
    fanout = 0
    egress = 0
    if MEMBERS > 1:  # else there is nothing to choose
        fanout, egress = weigh(hosted, counts, ranks, slots, H, G, HELD)
    at = measure_of(facts, domain, member, 0, MEMBERS)
    tl.store(at + PEAK, tl.max(load_G, 0))
    tl.store(at + COPIES, made)
    tl.store(at + FANOUT, fanout)
    tl.store(at + EGRESS, egress)


@triton.jit
def best_of_members(facts, domain, MEMBERS: tl.constexpr):
    """The member with the best attempt, the threshold, and the peak.

    The lowest peak above the threshold, then the fewest copies, the lowest fan-out, the fewest
    experts that one rank gives away; then the second member, then the earlier one.
    """
    threshold = tl.load(fact_of(facts, domain, THRESHOLD, MEMBERS))
    slack = tl.load(fact_of(facts, domain, SLACK, MEMBERS)) != 0
    best = 0
    at = measure_of(facts, domain, 0, 0, MEMBERS)
    peak = tl.load(at + PEAK)
    copies = tl.load(at + COPIES)
    fanout = tl.load(at + FANOUT)
    egress = tl.load(at + EGRESS)
    for member in tl.static_range(1, MEMBERS):
        at = measure_of(facts, domain, member, 0, MEMBERS)
        other_peak = tl.load(at + PEAK)
        other_copies = tl.load(at + COPIES)
        other_fanout = tl.load(at + FANOUT)
        other_egress = tl.load(at + EGRESS)
        floor = tl.maximum(peak, threshold)
        other_floor = tl.maximum(other_peak, threshold)
        better = (other_egress < egress) | ((other_egress == egress) & (member == 1))
        better = (other_fanout < fanout) | ((other_fanout == fanout) & better)
        better = (other_copies < copies) | ((other_copies == copies) & better)
        better = (other_floor < floor) | ((other_floor == floor) & better)
        better = slack & better
        best = tl.where(better, member, best)
        peak = tl.where(better, other_peak, peak)
        copies = tl.where(better, other_copies, copies)
        fanout = tl.where(better, other_fanout, fanout)
        egress = tl.where(better, other_egress, egress)
    return best, threshold, peak
