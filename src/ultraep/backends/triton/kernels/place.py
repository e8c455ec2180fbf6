"""Twin of `reference/place.py`: every domain is solved by one program, against one threshold.

    sum_loads    tokens of every expert over all source ranks, laid out by homes
    first_try    the two members, side by side, at the threshold
    search       the better of the two; if none meets the threshold, the least one that can be met

Shapes: R ranks, E experts, D domains of `ranks` ranks, H experts and G ranks padded to powers of
two, HELD spare slots of a domain, padded likewise. Numbers are 32-bit, but for sums of many.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.attempts import alias, alias_packed_or_not, window
from ultraep.backends.triton.kernels.bound import bound
from ultraep.backends.triton.kernels.plan import load_at
from ultraep.backends.triton.kernels.state import (
    BUFFERS,
    COPIES,
    MOST,
    PEAKS,
    SLACK,
    THRESHOLD,
    attempt_of,
    fact_of,
    found_quotas_of,
    home_of,
    load_domain,
    loads_of,
    quotas_of,
    scratch_of,
)
from ultraep.backends.triton.kernels.thresholds import mean_of, rank_loads_of, shared_threshold


@triton.jit(do_not_specialize=["ranks", "experts", "stride"])
def sum_loads(
    loads,
    place_of_expert,
    expert_loads,
    home,
    faults,
    ranks,
    experts,
    stride,
    BR: tl.constexpr,
    BE: tl.constexpr,
):
    """[E] tokens of every expert, and [D, H, G] the same by homes; -1 where there is no expert.

    Counts loads that are negative, too many, or add up to too many.

    >>> example(sum_loads, 1, loads=[[2, 1, 0, 1], [4, 0, 1, 0]], place_of_expert=[0, 2, 1, 3],
    ...         expert_loads=room(4), home=room(1, 2, 2), faults=[0],
    ...         ranks=2, experts=4, stride=4, BR=2, BE=4)
    expert_loads = [6, 1, 1, 1]
    home = [[[6, 1], [1, 1]]]
    """
    expert = tl.program_id(0) * BE + tl.arange(0, BE)
    known = expert < experts
    place_E = tl.load(place_of_expert + expert, mask=known, other=0)
    total_E = tl.zeros((BE,), tl.int64)
    bad_E = tl.zeros((BE,), tl.int32)
    for begin in range(0, ranks, BR):
        rank = begin + tl.arange(0, BR)
        at = load_at(loads, rank[:, None], expert[None, :], stride)
        mask = (rank < ranks)[:, None] & known[None, :]
        tokens = tl.load(at, mask=mask, other=0).to(tl.int64)
        bad_E += tl.sum(((tokens < 0) | (tokens > MOST)).to(tl.int32), 0)
        total_E += tl.sum(tokens, 0)
    bad = tl.sum(bad_E + (total_E > MOST).to(tl.int32), 0)
    tl.atomic_add(faults, bad, mask=bad > 0, sem="relaxed")
    total_E = tl.minimum(tl.maximum(total_E, 0), MOST).to(tl.int32)
    tl.store(expert_loads + expert, total_E, mask=known)
    tl.store(home + place_E, total_E, mask=known)


# The layout of a tile follows its first load. Where that may be wide, the experts of a rank end up
# in several threads; where the address is not known to be aligned, they stay in one.
@triton.jit(
    do_not_specialize=["domains", "ranks", "slots", "parts", "min_tokens", "limit"],
    do_not_specialize_on_alignment=["home"],
)
def first_try(
    home,
    attempts,
    attempt_loads,
    facts,
    domains,
    ranks,
    slots,
    parts,
    min_tokens,
    limit,
    H: tl.constexpr,
    G: tl.constexpr,
    HELD: tl.constexpr,
    ONE_SLOT: tl.constexpr,
    BY_GROUPS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program (d, b): the attempt of member b at domain d, into buffer b.

    With `BY_GROUPS`, the first member has made its attempt already.

    A tolerance of 40 % allows 6 tokens. One member fills rank 1 up, the other takes what is above:

    >>> example(first_try, (1, 2), home=[[[6, 1], [1, 1]]], attempts=room(1, 2, 2, 2),
    ...         attempt_loads=room(1, 2, 2), facts=room(1, 6), domains=1, ranks=2, slots=1,
    ...         parts=400000, min_tokens=1, limit=2,
    ...         H=2, G=2, HELD=2, ONE_SLOT=True, BY_GROUPS=False, STEP=1)
    attempts = [[[[-1, 0], [_, 4]], [[-1, 0], [_, 1]]]]
    attempt_loads = [[[3, 6], [6, 3]]]
    facts = [[6, 1, 6, 6, 1, 1]]
    """
    domain = tl.program_id(0)
    member = tl.program_id(1) + BY_GROUPS
    home_HG = load_domain(home, domain, H, G)
    load_G = rank_loads_of(home_HG)
    threshold = shared_threshold(home, domains, ranks, parts, H, G, STEP)
    slack = threshold > mean_of(load_G, ranks)
    hosted = attempt_of(attempts, domain, member, ranks * slots)
    made = 0
    if member == 0 and not BY_GROUPS:
        tl.store(fact_of(facts, domain, THRESHOLD, 0), threshold)
        tl.store(fact_of(facts, domain, SLACK, 0), slack.to(tl.int32))
        load_G, made = alias_packed_or_not(
            load_G, home_HG, hosted, threshold,
            ranks, slots, min_tokens, limit, H, G, HELD, ONE_SLOT
        )  # fmt: skip
    elif slack:
        load_G, made = window(
            load_G, home_HG, hosted, threshold, ranks, slots, min_tokens, limit, H, G, HELD
        )
    rank = tl.arange(0, G)
    served = loads_of(attempt_loads, domain, member, ranks)
    tl.store(served + rank, load_G, mask=rank < ranks)
    tl.store(fact_of(facts, domain, PEAKS, member), tl.max(load_G, 0))
    tl.store(fact_of(facts, domain, COPIES, member), made)


@triton.jit
def better(peak, made, other_peak, other_made, threshold):
    """Whether the other attempt is: a lower peak above the threshold, or no more copies."""
    floor = tl.maximum(peak, threshold)
    other_floor = tl.maximum(other_peak, threshold)
    return (other_floor < floor) | ((other_floor == floor) & (other_made <= made))


@triton.jit(
    do_not_specialize=["ranks", "slots", "min_tokens", "limit"],
    do_not_specialize_on_alignment=["home"],
)
def search(
    home,
    expert_of_place,
    first_slot_of_rank,
    attempts,
    attempt_loads,
    facts,
    scratch,
    found,
    planned_loads,
    expert_of_slot,
    ranks,
    slots,
    min_tokens,
    limit,
    FIRST: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    HELD: tl.constexpr,
    ONE_SLOT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program d: the best attempt at domain d. With `FIRST`, it makes the first one itself.

    Rank 1 hosts expert 0 for 3 tokens, as in the plan of `split`:

    >>> example(search, 1, home=[[[6, 1], [1, 1]]], expert_of_place=[0, 2, 1, 3],
    ...         first_slot_of_rank=[0, 3, 6], attempts=scratch(1, 3, 2, 2),
    ...         attempt_loads=scratch(1, 3, 2), facts=scratch(1, 6), scratch=scratch(1, 12),
    ...         found=room(2, 2), planned_loads=room(2), expert_of_slot=[0, 1, 0, 2, 3, 0],
    ...         ranks=2, slots=1, min_tokens=1, limit=2,
    ...         FIRST=True, H=2, G=2, HELD=2, ONE_SLOT=True, STEP=4)
    found = [[2147483647, 0], [0, 3]]
    planned_loads = [4, 5]
    expert_of_slot = [0, 1, -1, 2, 3, -1]
    """
    domain = tl.program_id(0)
    attempts = attempt_of(attempts, domain, 0, ranks * slots)
    attempt_loads = loads_of(attempt_loads, domain, 0, ranks)
    if FIRST:  # there is one domain, and no tolerance
        best = 0
        threshold, peak = try_alone(
            home, attempts, attempt_loads, domain,
            ranks, slots, min_tokens, limit, H, G, HELD, ONE_SLOT
        )  # fmt: skip
    else:
        best, threshold, peak = better_of_two(facts, domain)
    if peak > threshold:
        best = least_that_is_met(
            home, attempts, attempt_loads, scratch, domain, best, peak, threshold,
            ranks, slots, min_tokens, limit, H, G, HELD, ONE_SLOT, STEP
        )  # fmt: skip
    tl.debug_barrier()
    rank = tl.arange(0, G)
    load_G = tl.load(loads_of(attempt_loads, 0, best, ranks) + rank, mask=rank < ranks)
    tl.store(planned_loads + domain * ranks + rank, load_G, mask=rank < ranks)
    expert_of_place = home_of(expert_of_place, domain, H, G)
    write_found(found, attempts, expert_of_place, domain, best, ranks * slots, HELD)
    free_slots(expert_of_slot, first_slot_of_rank, domain, ranks, slots, HELD)


@triton.jit
def try_alone(
    home, hosted, served, domain, ranks, slots, min_tokens, limit,
    H: tl.constexpr, G: tl.constexpr, HELD: tl.constexpr, ONE_SLOT: tl.constexpr
):  # fmt: skip
    """The first attempt at the mean of the domain; that mean, and the peak that is left."""
    rank = tl.arange(0, G)
    home_HG = load_domain(home, domain, H, G)
    load_G = rank_loads_of(home_HG)
    threshold = mean_of(load_G, ranks)
    load_G, _made = alias_packed_or_not(
        load_G, home_HG, hosted, threshold,
        ranks, slots, min_tokens, limit, H, G, HELD, ONE_SLOT
    )  # fmt: skip
    tl.store(served + rank, load_G, mask=rank < ranks)
    return threshold, tl.max(load_G, 0)


@triton.jit
def better_of_two(facts, domain):
    """The buffer of the better one of the first attempts, the threshold, and the peak."""
    best = 0
    threshold = tl.load(fact_of(facts, domain, THRESHOLD, 0))
    peak = tl.load(fact_of(facts, domain, PEAKS, 0))
    made = tl.load(fact_of(facts, domain, COPIES, 0))
    if tl.load(fact_of(facts, domain, SLACK, 0)) != 0:
        other_peak = tl.load(fact_of(facts, domain, PEAKS, 1))
        other_made = tl.load(fact_of(facts, domain, COPIES, 1))
        other = better(peak, made, other_peak, other_made, threshold)
        best = tl.where(other, 1, best)
        peak = tl.where(other, other_peak, peak)
    return best, threshold, peak


@triton.jit
def write_found(found, attempts, expert_of_place, domain, best, held, HELD: tl.constexpr):
    """The experts and quotas of the best attempt, by spare slot."""
    slot = tl.arange(0, HELD)
    there = slot < held
    hosted = attempt_of(attempts, 0, best, held)
    place = tl.load(hosted + slot, mask=there, other=-1)
    quota = tl.load(quotas_of(hosted, held) + slot, mask=there & (place >= 0), other=0)
    expert = tl.load(expert_of_place + place, mask=place >= 0, other=MOST)
    tl.store(found + domain * held + slot, expert, mask=there)
    quotas = found_quotas_of(found, tl.num_programs(0) * held)
    tl.store(quotas + domain * held + slot, quota, mask=there)


@triton.jit
def free_slots(expert_of_slot, first_slot_of_rank, domain, ranks, slots, HELD: tl.constexpr):
    """No spare slot of the domain holds an expert until `split` says so."""
    slot = tl.arange(0, HELD)
    there = slot < ranks * slots
    slots = tl.maximum(slots, 1)
    end = tl.load(first_slot_of_rank + domain * ranks + slot // slots + 1, mask=there, other=0)
    tl.store(expert_of_slot + end - 1 - slot % slots, slot * 0 - 1, mask=there)


@triton.jit
def least_that_is_met(
    home, attempts, attempt_loads, scratch, domain, best, peak, threshold,
    ranks, slots, min_tokens, limit,
    H: tl.constexpr, G: tl.constexpr, HELD: tl.constexpr, ONE_SLOT: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """The buffer of the best attempt above the threshold; `attempts` are those of the domain."""
    home_HG = load_domain(home, domain, H, G)
    load_G = rank_loads_of(home_HG)
    mean = mean_of(load_G, ranks)
    rank, held = tl.arange(0, G), ranks * slots
    scratch = scratch_of(scratch, domain, H, G)
    least = bound(load_G, home_of(home, domain, H, G), scratch, ranks, slots, limit, H, G, STEP)
    failed = tl.maximum(threshold, least - 1)
    middle = failed + 1
    while peak - failed > 1:
        trial = (best + 1) % BUFFERS
        spare = (best + 2) % BUFFERS
        end_G, made = alias(
            load_G, home_HG, attempt_of(attempts, 0, trial, held), middle,
            ranks, slots, min_tokens, limit, H, G, HELD, ONE_SLOT, False
        )  # fmt: skip
        trial_peak = tl.max(end_G, 0)
        if middle > mean:
            other_G, other_made = window(
                load_G, home_HG, attempt_of(attempts, 0, spare, held), middle,
                ranks, slots, min_tokens, limit, H, G, HELD
            )  # fmt: skip
            other_peak = tl.max(other_G, 0)
            other = better(trial_peak, made, other_peak, other_made, middle)
            end_G = tl.where(other, other_G, end_G)
            trial = tl.where(other, spare, trial)
            trial_peak = tl.where(other, other_peak, trial_peak)
        failed = tl.where(trial_peak > middle, middle, failed)
        if trial_peak < peak:
            served = loads_of(attempt_loads, 0, trial, ranks)
            tl.store(served + rank, end_G, mask=rank < ranks)
            best = trial
            peak = trial_peak
        middle = failed + (peak - failed) // 2
    return best


@triton.jit(do_not_specialize=["ranks", "slots", "limit"])
def lower_bounds(
    home,
    scratch,
    bounds,
    ranks,
    slots,
    limit,
    H: tl.constexpr,
    G: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program d: the bound of domain d.

    >>> example(lower_bounds, 1, home=[[[6, 1], [1, 1]]], scratch=scratch(1, 12),
    ...         bounds=room(1), ranks=2, slots=1, limit=2, H=2, G=2, STEP=4)
    bounds = [5]
    """
    domain = tl.program_id(0)
    load_G = rank_loads_of(load_domain(home, domain, H, G))
    scratch = scratch_of(scratch, domain, H, G)
    least = bound(load_G, home_of(home, domain, H, G), scratch, ranks, slots, limit, H, G, STEP)
    tl.store(bounds + domain, least)
