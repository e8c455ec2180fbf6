"""Choose an attempt, search for the least threshold that is met, and publish the plan.

note, best_of_members    measures of an attempt, and the best one
bound                    twin of `least_peak_of` in `reference/place.py`, for one domain
least_that_is_met        twin of `solve` there
publish                  write the chosen attempt as the plan
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ultraep.backends.triton.kernels import state
from ultraep.backends.triton.kernels.attempts import alias, alias_packed_or_not
from ultraep.backends.triton.kernels.state import (
    MAX_THRESHOLD,
    MEASURES,
    MOST,
    PARTS,
    SLACK,
    THRESHOLD,
    UNITS_PER_ROW,
    Attempts,
)

GUESSES = tl.constexpr(4)
SHORT = tl.constexpr(1 << 14)
PEAK, COPIES, FANOUT, EGRESS = (tl.constexpr(number) for number in range(4))


class PlanOut(NamedTuple):
    """Where `publish` writes a plan, and the tables it needs."""

    placed: Any
    planned_loads: Any
    expert_of_slot: Any
    expert_of_place: Any
    first_slot_of_rank: Any


@triton.jit
def weigh(hosted, counts, problem, SHAPE: tl.constexpr):
    """Return the most replicas of one expert, and the most experts that one rank gives away.

    counts: scratch memory for H * G integers.
    """
    place = tl.arange(0, SHAPE.H * SHAPE.G)
    tl.store(counts + place, place * 0)
    slot = tl.arange(0, SHAPE.HELD)
    tl.debug_barrier()  # the attempt is in memory, too
    place_of_slot = tl.load(hosted + slot, mask=slot < state.held_by(problem), other=-1)
    tl.atomic_add(counts + place_of_slot, 1, mask=place_of_slot >= 0, sem="relaxed")
    tl.debug_barrier()
    rank = tl.arange(0, SHAPE.G)
    at_HG = tl.arange(0, SHAPE.H)[:, None] * SHAPE.G + rank[None, :]
    copies_HG = tl.load(counts + at_HG, cache_modifier=".cg")
    fanout = tl.max(tl.max(copies_HG, 0), 0)
    return fanout, tl.max(tl.sum((copies_HG > 0).to(tl.int32), 0), 0)


@triton.jit
def received_by(hosted, problem, SHAPE: tl.constexpr):
    """[G] replicas that every rank receives."""
    rank = tl.arange(0, SHAPE.G)
    received_G = rank * 0
    for index in range(problem.slots):
        at_G = hosted + rank * problem.slots + index
        received_G += (tl.load(at_G, mask=rank < problem.ranks, other=-1) >= 0).to(tl.int32)
    return received_G


@triton.jit
def note(tried, hosted, counts, load_G, num_copies, member, problem, SHAPE: tl.constexpr):
    """Write the measures of a heuristic's attempt."""
    fanout = 0
    egress = 0
    if SHAPE.MEMBERS > 1:  # a single heuristic is not compared
        fanout, egress = weigh(hosted, counts, problem, SHAPE)
    at = tried.facts + MEASURES + 4 * member
    tl.store(at + PEAK, state.peak_of(load_G, problem, SHAPE))
    tl.store(at + COPIES, num_copies)
    tl.store(at + FANOUT, fanout)
    tl.store(at + EGRESS, egress)


@triton.jit
def best_of_members(tried, SHAPE: tl.constexpr):
    """Return the heuristic with the best attempt, the threshold, and the peak of that attempt.

    Compares, in this order: peak above the threshold, replicas, fan-out, egress; ties go to the
    second heuristic, then to the earlier one.
    """
    threshold = tl.load(tried.facts + THRESHOLD)
    slack = tl.load(tried.facts + SLACK) != 0
    best = 0
    at = tried.facts + MEASURES
    peak = tl.load(at + PEAK)
    copies = tl.load(at + COPIES)
    fanout = tl.load(at + FANOUT)
    egress = tl.load(at + EGRESS)
    MEMBERS: tl.constexpr = SHAPE.MEMBERS
    for member in tl.static_range(1, MEMBERS):
        at = tried.facts + MEASURES + 4 * member
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


@triton.jit
def place_in_line(key_N, keys, N: tl.constexpr, STEP: tl.constexpr):
    """[N] how many keys are larger, or equal and earlier; `keys` holds key_N in memory."""
    number = tl.arange(0, N)
    place_N = number * 0
    for begin in range(0, N, STEP):
        other = begin + tl.arange(0, STEP)
        key_S = tl.load(keys + other)
        ahead = key_S[:, None] > key_N[None, :]
        tied = (key_S[:, None] == key_N[None, :]) & (other[:, None] < number[None, :])
        place_N += tl.sum((ahead | tied).to(tl.int32), 0)
    return place_N


@triton.jit
def bound(load_G, home, scratch, problem, SHAPE: tl.constexpr, STEP: tl.constexpr):
    """Return the least threshold that any plan can meet, if it is above the mean.

    home: [H * G] rows of the home experts.   scratch: memory for 2 * H * G + 2 * G integers.
    """
    rank = tl.arange(0, SHAPE.G)
    # Emptiest rank first; padding columns last.
    if SHAPE.SPEEDS:
        speed_G = problem.speeds.of_rank
        least_speed_G = tl.maximum(speed_G, 1)
        key_G = -state.quotient(load_G.to(tl.int64) * PARTS + least_speed_G - 1, least_speed_G)
        key_G = tl.where(rank < problem.ranks, key_G, -MAX_THRESHOLD - 1)
    else:
        key_G = tl.where(rank < problem.ranks, -load_G, -MOST - 1)
    tl.store(scratch + rank, key_G)
    tl.debug_barrier()
    place_G = place_in_line(key_G, scratch, SHAPE.G, min(STEP * SHAPE.H, SHAPE.G))
    tl.debug_barrier()  # all keys have been read
    tl.store(scratch + SHAPE.G + place_G, load_G)
    tl.store(scratch + rank, place_G)
    tl.debug_barrier()
    emptiest_G = tl.load(scratch + SHAPE.G + rank, mask=rank < problem.ranks, other=0)
    rest_G = tl.sum(emptiest_G, 0) - tl.cumsum(emptiest_G, 0) + emptiest_G
    number = tl.arange(0, SHAPE.H * SHAPE.G)
    tokens_N = tl.load(home + number)
    rank_place_N = tl.load(scratch + number % SHAPE.G)
    line_N = place_in_line(tokens_N, home, SHAPE.H * SHAPE.G, STEP)
    hottest = scratch + 2 * SHAPE.G
    tl.store(hottest + line_N, tl.maximum(tokens_N, 0))
    tl.store(hottest + SHAPE.H * SHAPE.G + line_N, rank_place_N)
    tl.debug_barrier()
    movable_G = movable_rows(hottest, problem, SHAPE, STEP)
    if SHAPE.SPEEDS:
        tl.store(scratch + SHAPE.G + place_G, speed_G)
        tl.debug_barrier()
        weight_G = tl.load(scratch + SHAPE.G + rank, mask=rank < problem.ranks, other=0)
        weight_G = tl.maximum(tl.sum(weight_G, 0) - tl.cumsum(weight_G, 0) + weight_G, 1)
        rows_G = (rest_G - movable_G).to(tl.int64)
        peak_G = state.quotient(rows_G * PARTS + weight_G - 1, weight_G)
    else:
        others_G = tl.maximum(problem.ranks - rank, 1)
        peak_G = (rest_G - movable_G + others_G - 1) // others_G
    return tl.max(tl.where(rank < problem.ranks, peak_G, 0), 0)


@triton.jit
def movable_rows(hottest, problem, SHAPE: tl.constexpr, STEP: tl.constexpr):
    """[G] rows that the k emptiest ranks can take from the others, for k = 0, 1, ...

    hottest: [2, H * G] rows of all experts, the hottest first, and the places of their ranks.
    """
    rank = tl.arange(0, SHAPE.G)
    wanted_G = tl.minimum(problem.slots * rank, problem.limit)
    outside_G = rank * 0
    movable_G = outside_G.to(hottest.dtype.element_ty)
    CHUNK: tl.constexpr = min(STEP * SHAPE.H, SHAPE.H * SHAPE.G)
    for begin in range(0, SHAPE.H * SHAPE.G, CHUNK):
        at_C = hottest + begin + tl.arange(0, CHUNK)
        tokens_C = tl.load(at_C)
        outside_CG = tl.load(at_C + SHAPE.H * SHAPE.G)[:, None] >= rank[None, :]
        counted_CG = outside_CG.to(tl.int32)
        taken_CG = outside_CG & (outside_G[None, :] + tl.cumsum(counted_CG, 0) <= wanted_G[None, :])
        movable_G += tl.sum(tl.where(taken_CG, tokens_C[:, None], 0), 0)
        outside_G += tl.sum(counted_CG, 0)
    return movable_G


@triton.jit
def excess_share(load_G, threshold, problem, SHAPE: tl.constexpr):
    """Return how far to raise the threshold so that full ranks may keep their surplus."""
    if SHAPE.SPEEDS:
        height_G, _limit = state.relative_to(load_G, threshold, problem, SHAPE)
        over = tl.sum(tl.maximum(height_G, 0).to(tl.int64), 0)
        speed_G = problem.speeds.of_rank
        weight = tl.maximum(tl.sum(tl.where(height_G >= 0, speed_G, 0), 0), 1)
        return state.quotient(over * PARTS + weight - 1, weight)
    else:  # noqa: RET505 - without `else`, Triton compiles both
        full_G = load_G >= threshold
        over = tl.sum(tl.where(full_G, load_G - threshold, 0).to(tl.int64), 0)
        full = tl.maximum(tl.sum(full_G.to(tl.int32), 0), 1)
        return (over + full - 1) // full


@triton.jit
def least_that_is_met(
    home, tried, domain, best, peak, alias_peak, threshold, problem,
    SHAPE: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Return the buffer of the best attempt above the threshold.

    tried: buffers of the domain.   alias_peak: of the first attempt at the threshold, in buffer 0.
    """
    SPARE: tl.constexpr = SHAPE.BUFFERS - 3  # the first of the two search buffers
    problem = state.reloaded(problem, domain, SHAPE)
    home_HG = state.load_domain(home, domain, SHAPE)
    load_G = state.rank_loads_of(home_HG)
    rank = tl.arange(0, SHAPE.G)
    own_home = state.home_of(home, domain, SHAPE)
    least = bound(load_G, own_home, tried.scratch, problem, SHAPE, STEP)
    UNIT: tl.constexpr = UNITS_PER_ROW.value if SHAPE.SPEEDS else 1
    tl.debug_barrier()
    end_G = tl.load(tried.attempt_loads + rank, mask=rank < problem.ranks, other=0)
    failed = tl.maximum(threshold, least - 1)
    last = threshold
    above_last = alias_peak - threshold
    share = excess_share(end_G, threshold, problem, SHAPE)
    middle = tl.maximum(failed + 1, threshold + share)
    met = 0
    tries = 0
    while peak - failed > UNIT:
        now = tl.minimum(middle, peak - UNIT).to(threshold.dtype)
        trial = tl.where(best == SPARE, SPARE + 1, SPARE)
        hosted = state.attempt_of(tried.attempts, trial, problem)
        start_G, limit = state.relative_to(load_G, now, problem, SHAPE)
        end_G, _home_HG, _made, _received = alias(
            start_G, home_HG, hosted, limit, tl.zeros((), tl.int64), problem.slots, problem,
            SHAPE, False, False
        )  # fmt: skip
        end_G = state.loads_after(load_G, start_G, end_G, SHAPE)
        trial_peak = state.peak_of(end_G, problem, SHAPE)
        tries += 1
        if trial_peak < peak:
            loads = tried.attempt_loads + trial * problem.ranks
            tl.store(loads + rank, end_G, mask=rank < problem.ranks)
            best = trial
            peak = trial_peak
        above = trial_peak - now
        is_met = above <= 0
        met += is_met.to(tl.int32)
        gain = above_last - above
        if SHAPE.SPEEDS:
            steps = steps_of_speeds(above, gain, now - last)
        else:
            steps = tl.maximum(above, 0).to(tl.int64) * (now - last) + gain - 1
            steps = steps // tl.maximum(gain, 1)
        step = tl.where(gain > 0, steps, excess_share(end_G, now, problem, SHAPE))
        failed = tl.where(is_met, failed, now)
        above_last = tl.where(is_met, above_last, above)
        last = tl.where(is_met, last, now)
        half = (failed + (peak - failed) // 2).to(tl.int64)
        below = tl.where(met == 1, (peak - UNIT).to(tl.int64), half)
        guess = tl.where((met == 0) & (tries < GUESSES), now + tl.maximum(step, 1), half)
        middle = tl.where(is_met, below, guess)
    return best


@triton.jit
def steps_of_speeds(above, gain, moved):
    """Return `above * moved / gain`, rounded up, with products of less than 63 bits."""
    above = tl.maximum(above, 0)
    gain = tl.maximum(gain, 1)
    while above >= SHORT:
        above = above // 2
        gain = tl.maximum(gain // 2, 1)
    return (above * moved + gain - 1) // gain


@triton.jit
def publish(plan, tried, domain, best, problem, SHAPE: tl.constexpr):
    """Write replicas and loads of an attempt, which another program of this launch may have made.

    tried: buffers of the domain.
    """
    rank, there = tl.arange(0, SHAPE.G), tl.arange(0, SHAPE.G) < problem.ranks
    loads = tried.attempt_loads + best * problem.ranks
    load_G = tl.load(loads + rank, mask=there, cache_modifier=".cg")
    tl.store(plan.planned_loads + domain * problem.ranks + rank, load_G, mask=there)
    write_placed(plan, tried.attempts, domain, best, problem, SHAPE)
    free_slots(plan, domain, problem, SHAPE)


@triton.jit
def write_placed(plan, attempts, domain, best, problem, SHAPE: tl.constexpr):
    """Write experts and quotas of the best attempt, by spare slot."""
    slot, held = tl.arange(0, SHAPE.HELD), state.held_by(problem)
    there = slot < held
    hosted = state.attempt_of(attempts, best, problem)
    place = tl.load(hosted + slot, mask=there, other=-1, cache_modifier=".cg")
    quotas = state.quotas_of(hosted, problem)
    quota = tl.load(quotas + slot, mask=there & (place >= 0), other=0, cache_modifier=".cg")
    expert_of_place = state.home_of(plan.expert_of_place, domain, SHAPE)
    expert = tl.load(expert_of_place + place, mask=place >= 0, other=MOST)
    tl.store(plan.placed + domain * held + slot, expert, mask=there)
    all_quotas = plan.placed + tl.num_programs(0) * held
    tl.store(all_quotas + domain * held + slot, quota, mask=there)


@triton.jit
def free_slots(plan, domain, problem, SHAPE: tl.constexpr):
    """Mark all spare slots of the domain as free; `split` fills them."""
    slot = tl.arange(0, SHAPE.HELD)
    there = slot < state.held_by(problem)
    slots = tl.maximum(problem.slots, 1)
    first_slot = plan.first_slot_of_rank + domain * problem.ranks
    end = tl.load(first_slot + slot // slots + 1, mask=there, other=0)
    tl.store(plan.expert_of_slot + end - 1 - slot % slots, slot * 0 - 1, mask=there)


@triton.jit(
    do_not_specialize=["ranks", "slots", "min_tokens", "limit"],
    do_not_specialize_on_alignment=["home"],
)
def search(
    home,
    tried: Attempts,
    plan: PlanOut,
    ranks,
    slots,
    min_tokens,
    limit,
    speeds,
    FIRST: tl.constexpr,
    SHAPE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program d: the best attempt at domain d, or one at the least threshold that is met.

    FIRST: this program makes the first attempt; there is one domain and no tolerance.

    Rank 1 hosts expert 0 and serves 3 of its rows, as in the example of `split`:

    >>> example(search, 1, home=[[[6, 1], [1, 1]]], placed=empty(2, 2), planned_loads=empty(2),
    ...         expert_of_slot=[0, 1, 0, 2, 3, 0], FIRST=True)
    placed = [[2147483647, 0], [0, 3]]
    planned_loads = [4, 5]
    expert_of_slot = [0, 1, -1, 2, 3, -1]
    """
    domain = tl.program_id(0)
    problem = state.problem_of(domain, ranks, slots, min_tokens, limit, speeds, SHAPE)
    if FIRST:
        home_HG = state.load_domain(home, domain, SHAPE)
    if SHAPE.EITHER:  # noqa: SIM102 - only a separate condition is left out at compile time
        if state.planned_elsewhere(speeds, SHAPE):
            return
    tried = state.at_domain(tried, domain, problem, SHAPE)
    if FIRST:
        threshold, peak = try_alone(home_HG, tried, domain, problem, SHAPE)
        best = domain * 0
        alias_peak = peak
    else:
        best, threshold, peak = best_of_members(tried, SHAPE)
        alias_peak = tl.load(tried.facts + MEASURES + PEAK)
    if peak > threshold:
        best = least_that_is_met(
            home, tried, domain, best, peak, alias_peak, threshold, problem, SHAPE, STEP
        )
    tl.debug_barrier()
    publish(plan, tried, domain, best, problem, SHAPE)


@triton.jit
def try_alone(home_HG, tried, domain, problem, SHAPE: tl.constexpr):
    """Attempt the mean of the domain; return that mean and the peak that is left."""
    rank = tl.arange(0, SHAPE.G)
    load_G = state.rank_loads_of(home_HG)
    threshold = state.mean_of(load_G, domain, problem, SHAPE)
    start_G, limit = state.relative_to(load_G, threshold, problem, SHAPE)
    most = state.most_rows(load_G, start_G, limit, SHAPE)
    end_G, _home_HG, _made, _received = alias_packed_or_not(
        start_G, home_HG, tried.attempts, limit, most, tl.zeros((), tl.int64), problem.slots,
        problem, SHAPE, False
    )  # fmt: skip
    load_G = state.loads_after(load_G, start_G, end_G, SHAPE)
    tl.store(tried.attempt_loads + rank, load_G, mask=rank < problem.ranks)
    if SHAPE.SPEEDS:
        peak = threshold
        if tl.max(end_G, 0) > limit:  # only then: divisions are slow
            peak = state.peak_of(load_G, problem, SHAPE)
        return threshold, peak
    else:  # noqa: RET505 - without `else`, Triton compiles both
        return threshold, state.peak_of(load_G, problem, SHAPE)
