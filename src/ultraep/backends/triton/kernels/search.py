"""Attempt a threshold, search for the least one that is met, and publish the plan.

thrifty_or_alias    first attempts of `balance` in `reference/place.py`
bound               twin of `least_peak_of` there, for one domain
least_that_is_met   the search in `solve` there
publish             write the chosen attempt as the plan
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ultraep.backends.triton.kernels import state
from ultraep.backends.triton.kernels.attempts import alias, alias_packed_or_not
from ultraep.backends.triton.kernels.state import (
    MAX_THRESHOLD,
    MOST,
    PARTS,
    UNITS_PER_ROW,
    Attempts,
)

GUESSES = tl.constexpr(4)
SHORT = tl.constexpr(1 << 14)


class PlanOut(NamedTuple):
    """Where `publish` writes a plan, and the tables it needs."""

    placed: Any
    planned_loads: Any
    expert_of_slot: Any
    expert_of_place: Any
    first_slot_of_rank: Any


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
    home, tried, domain, peak, threshold, problem, SHAPE: tl.constexpr, STEP: tl.constexpr
):
    """Return the buffer of the best attempt above the threshold.

    tried: buffers of the domain.   peak: of `alias` at the threshold, which is in buffer 0.
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
    above_last = peak - threshold
    share = excess_share(end_G, threshold, problem, SHAPE)
    middle = tl.maximum(failed + 1, threshold + share)
    best = 0
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


# The first load of a tile determines its layout. A wide load spreads the experts of a rank over
# several threads; without a known alignment of `home`, they stay in one thread.
@triton.jit(
    do_not_specialize=["domains", "ranks", "slots", "min_tokens", "limit", "parts"],
    do_not_specialize_on_alignment=["home"],
)
def search(
    home,
    tried: Attempts,
    plan: PlanOut,
    domains,
    ranks,
    slots,
    min_tokens,
    limit,
    speeds,
    parts,
    LOOSE: tl.constexpr,
    SHAPE: tl.constexpr,
    STEP: tl.constexpr,
    SEARCH_STEP: tl.constexpr,
):
    """Program d: an attempt at domain d that meets the threshold, or the least one that is met.

    LOOSE: the threshold may exceed the mean of a domain: there is a tolerance, or another domain.

    Rank 1 hosts expert 0 and serves 3 of its rows, as in the example of `split`. A tolerance of
    40 % allows 6 rows, and rank 0 gives away only its surplus:

    >>> for LOOSE in (False, True):
    ...     example(search, 1, home=[[[6, 1], [1, 1]]], placed=empty(2, 2), planned_loads=empty(2),
    ...             expert_of_slot=[0, 1, 0, 2, 3, 0], parts=400000, LOOSE=LOOSE, STEP=1,
    ...             SEARCH_STEP=4)
    placed = [[2147483647, 0], [0, 3]]
    planned_loads = [4, 5]
    expert_of_slot = [0, 1, -1, 2, 3, -1]
    placed = [[2147483647, 0], [0, 1]]
    planned_loads = [6, 3]
    expert_of_slot = [0, 1, -1, 2, 3, -1]
    """
    domain = tl.program_id(0)
    problem = state.problem_of(domain, ranks, slots, min_tokens, limit, speeds, SHAPE)
    home_HG = state.load_domain(home, domain, SHAPE)
    tried = state.at_domain(tried, domain, problem, SHAPE)
    load_G = state.rank_loads_of(home_HG)
    if LOOSE:
        threshold = state.shared_threshold(
            load_G, home, domain, domains, parts, problem, SHAPE, STEP
        )
        peak = thrifty_or_alias(load_G, home_HG, home, tried, domain, threshold, problem, SHAPE)
    else:
        threshold = state.mean_of(load_G, domain, problem, SHAPE)
        peak = attempt(load_G, home_HG, tried, threshold, problem, SHAPE, False)
    best = domain * 0
    if peak > threshold:
        best = least_that_is_met(home, tried, domain, peak, threshold, problem, SHAPE, SEARCH_STEP)
    tl.debug_barrier()
    publish(plan, tried, domain, best, problem, SHAPE)


@triton.jit
def thrifty_or_alias(load_G, home_HG, home, tried, domain, threshold, problem, SHAPE: tl.constexpr):
    """Attempt the threshold with `thrifty`; if it is not met, with `alias`. Return the peak."""
    start_G, limit = state.relative_to(load_G, threshold, problem, SHAPE)
    thrifty = slack_of(start_G, limit, problem) >= problem.ranks
    peak = threshold
    if thrifty:
        peak = attempt(load_G, home_HG, tried, threshold, problem, SHAPE, True)
    if (not thrifty) | (peak > threshold):
        # Rows at home are loaded again: they would take registers during the first attempt.
        home_HG = state.load_domain(home, domain, SHAPE)
        peak = attempt(load_G, home_HG, tried, threshold, problem, SHAPE, False)
    return peak


@triton.jit
def slack_of(start_G, limit, problem):
    """Return the rows by which all limits exceed all loads; both as in `relative_to`."""
    return limit.to(tl.int64) * problem.ranks - tl.sum(start_G.to(tl.int64), 0)


@triton.jit
def attempt(load_G, home_HG, tried, threshold, problem, SHAPE: tl.constexpr, THRIFTY: tl.constexpr):
    """Attempt a threshold in the first buffer; return the peak that is left."""
    rank = tl.arange(0, SHAPE.G)
    start_G, limit = state.relative_to(load_G, threshold, problem, SHAPE)
    slack = slack_of(start_G, limit, problem)
    most = state.most_rows(load_G, start_G, limit, SHAPE)
    end_G, _home_HG, _made, _received = alias_packed_or_not(
        start_G, home_HG, tried.attempts, limit, most, slack, problem.slots, problem,
        SHAPE, THRIFTY
    )  # fmt: skip
    load_G = state.loads_after(load_G, start_G, end_G, SHAPE)
    tl.store(tried.attempt_loads + rank, load_G, mask=rank < problem.ranks)
    if SHAPE.SPEEDS:
        peak = threshold
        if tl.max(end_G, 0) > limit:  # only then: divisions are slow
            peak = state.peak_of(load_G, problem, SHAPE)
        return peak
    else:  # noqa: RET505 - without `else`, Triton compiles both
        return state.peak_of(load_G, problem, SHAPE)
