"""Statistics of plans on the device, so that replays of a graph are counted, too.

add_plan     add a plan to int64 sums: microbatches, replicas, microbatches without a replica,
             imbalance before and after in parts of `PARTS`, and the worst imbalance after; with
             speeds, of rows over speed
keep_plan    store a plan in a ring. An entry holds site, step, loads and result.
             `state`: number of plans so far, and the step of the next plan
"""

import triton
import triton.language as tl

PARTS = tl.constexpr(100_000)
MILLION = tl.constexpr(1_000_000)  # thousandths of a row at nominal speed, in thousandths of it
MICROBATCHES, COPIES, SKIPPED, BEFORE, AFTER, WORST = (tl.constexpr(n) for n in range(6))
KEPT, STEP = tl.constexpr(0), tl.constexpr(1)
HEADER = tl.constexpr(2)  # numbers before the loads


@triton.jit
def add_to(sums, index: tl.constexpr, number):
    tl.store(sums + index, tl.load(sums + index) + number)


@triton.jit
def over_mean(peak, ranks, total):
    """Return the peak in parts of the mean; PARTS without rows."""
    parts = peak.to(tl.int64) * ranks * PARTS // tl.maximum(total, 1)
    return tl.where(total > 0, parts, PARTS)


@triton.jit
def over_ideal(load_R, speed_R, total):
    """Return the largest rows over speed, in parts of a perfect balance; PARTS without rows."""
    speeds_R = tl.maximum(speed_R, 1)
    peak = tl.max((load_R.to(tl.int64) * MILLION + speeds_R - 1) // speeds_R, 0)
    parts = peak.to(tl.float64) * tl.sum(speed_R, 0) * PARTS / MILLION / tl.maximum(total, 1)
    return tl.where(total > 0, parts.to(tl.int64), PARTS)


@triton.jit
def add_plan(
    sums,
    homes,
    home_of_expert,
    num_replicas,
    rank_loads,
    replicas,
    quotas,
    speeds,
    ranks,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Add one plan to the sums. One program.

    homes: [R] scratch.   speeds: [R] 64-bit, or None if they are equal.
    Rank 0 is home of both experts, 10 of 12 rows; a replica on rank 1 takes 4.

    >>> example(add_plan, 1, sums=[0, 0, 0, 0, 0, 0], home_of_expert=[0, 0], num_replicas=[1],
    ...         rank_loads=[6, 6], replicas=[[1, 1, 0], [-1, -1, -1]], quotas=[4, 0], speeds=None)
    sums = [1, 1, 0, 166666, 100000, 100000]
    """
    rank, replica = tl.arange(0, R), tl.arange(0, C)
    there_R = rank < ranks
    load_R = tl.load(rank_loads + rank, mask=there_R, other=0)
    tl.store(homes + rank, load_R, mask=there_R)
    count = tl.load(num_replicas)
    there_C = replica < count
    expert_C = tl.load(replicas + 3 * replica, mask=there_C, other=0)
    host_C = tl.load(replicas + 3 * replica + 1, mask=there_C, other=0)
    quota_C = tl.load(quotas + replica, mask=there_C, other=0)
    tl.debug_barrier()
    tl.atomic_add(homes + tl.load(home_of_expert + expert_C), quota_C, mask=there_C)
    tl.atomic_add(homes + host_C, -quota_C, mask=there_C)
    tl.debug_barrier()
    at_home_R = tl.atomic_add(homes + rank, rank * 0, mask=there_R)
    total = tl.sum(load_R.to(tl.int64), 0)
    at_home_R = tl.where(there_R, at_home_R, 0)
    if speeds is None:
        before = over_mean(tl.max(at_home_R, 0), ranks, total)
        after = over_mean(tl.max(load_R, 0), ranks, total)
    else:
        speed_R = tl.load(speeds + rank, mask=there_R, other=0)
        before = over_ideal(at_home_R, speed_R, total)
        after = over_ideal(load_R, speed_R, total)
    add_to(sums, MICROBATCHES, 1)
    add_to(sums, COPIES, count)
    add_to(sums, SKIPPED, (count == 0).to(tl.int64))
    add_to(sums, BEFORE, before)
    add_to(sums, AFTER, after)
    tl.store(sums + WORST, tl.maximum(tl.load(sums + WORST), after))


@triton.jit
def copy_numbers(source, target, count, B: tl.constexpr):
    for begin in range(0, count, B):
        at = begin + tl.arange(0, B)
        there = at < count
        tl.store(target + at, tl.load(source + at, mask=there, other=0).to(tl.int32), mask=there)


@triton.jit(do_not_specialize=["site"])
def keep_plan(
    ring, state, loads, result, site, places, size, num_loads, num_results, B: tl.constexpr
):
    """Store the plan of one microbatch over the oldest one. One program."""
    kept = tl.load(state + KEPT)
    at = ring + (kept % places).to(tl.int64) * size
    tl.store(at, site)
    tl.store(at + 1, tl.load(state + STEP))
    copy_numbers(loads, at + HEADER, num_loads, B)
    copy_numbers(result, at + HEADER + num_loads, num_results, B)
    tl.debug_barrier()
    tl.store(state + KEPT, kept + 1)
