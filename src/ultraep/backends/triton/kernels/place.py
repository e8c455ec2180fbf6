"""Twin of `reference/place.py`: every domain is solved by one program, against one threshold.

    sum_loads    tokens of every expert over all source ranks, laid out by homes
    first_try    all members, side by side, at the thresholds of all rungs
    search       the best of them; if none meets the threshold, the least one that can be met

and where time decides, `quickest.py` has the last word.

Shapes: R ranks, E experts, D domains of `ranks` ranks, H experts and G ranks padded to powers of
two, HELD spare slots of a domain, padded likewise. Numbers are 32-bit, but for sums of many.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.attempts import alias_packed_or_not, free_all, window
from ultraep.backends.triton.kernels.bound import bound
from ultraep.backends.triton.kernels.circles import close_circles, variant_of
from ultraep.backends.triton.kernels.measures import best_of_members, note, weigh
from ultraep.backends.triton.kernels.plan import load_at
from ultraep.backends.triton.kernels.publish import publish
from ultraep.backends.triton.kernels.search import least_that_is_met
from ultraep.backends.triton.kernels.state import (
    AT_HOME,
    BUFFER,
    COPIES,
    EGRESS,
    FANOUT,
    INGRESS,
    MEASURED,
    MOST,
    PEAK,
    SLACK,
    THRESHOLD,
    attempt_of,
    attempts_of,
    counts_of,
    fact_of,
    home_of,
    load_domain,
    loads_of,
    measure_of,
    outcome_of,
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
    do_not_specialize=["domains", "ranks", "slots", "min_tokens", "limit"],
    do_not_specialize_on_alignment=["home"],
)
def first_try(
    home,
    ladder,
    counts,
    attempts,
    attempt_loads,
    facts,
    domains,
    ranks,
    slots,
    min_tokens,
    limit,
    H: tl.constexpr,
    G: tl.constexpr,
    HELD: tl.constexpr,
    ONE_SLOT: tl.constexpr,
    RUNGS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BY_GROUPS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program (d, m, r): the attempt of member m at rung r of domain d.

    With `BY_GROUPS`, the first member has made its attempt already.

    A tolerance of 40 % allows 6 tokens. One member fills rank 1 up, the other takes what is above:

    >>> example(first_try, (1, 2, 1), home=[[[6, 1], [1, 1]]], ladder=[400000],
    ...         counts=scratch(1, 1, 2, 4), attempts=room(1, 2, 2, 2), attempt_loads=room(1, 2, 2),
    ...         facts=room(1, 12), domains=1, ranks=2, slots=1, min_tokens=1, limit=2,
    ...         H=2, G=2, HELD=2, ONE_SLOT=True, RUNGS=1, MEMBERS=2, BY_GROUPS=False, STEP=1)
    attempts = [[[[-1, 0], [_, 4]], [[-1, 0], [_, 1]]]]
    attempt_loads = [[[3, 6], [6, 3]]]
    facts = [[6, 1, 6, 1, 1, 1, 1, 6, 1, 1, 1, 1]]
    """
    domain = tl.program_id(0)
    member = tl.program_id(1) + BY_GROUPS
    rung = tl.program_id(2)
    rank = tl.arange(0, G)
    home_HG = load_domain(home, domain, H, G)
    load_G = rank_loads_of(home_HG)
    parts = tl.load(ladder + rung)
    threshold = shared_threshold(home, domains, ranks, parts, H, G, STEP)
    slack = threshold > mean_of(load_G, ranks)
    buffer = rung * MEMBERS + member
    attempts = attempts_of(attempts, domain, ranks * slots, RUNGS, MEMBERS)
    hosted = attempt_of(attempts, buffer, ranks * slots)
    made = 0
    if member == 0 and not BY_GROUPS:
        tl.store(fact_of(facts, domain, rung, THRESHOLD, RUNGS, MEMBERS), threshold)
        tl.store(fact_of(facts, domain, rung, SLACK, RUNGS, MEMBERS), slack.to(tl.int32))
        load_G, made = alias_packed_or_not(
            load_G, home_HG, hosted, threshold,
            ranks, slots, min_tokens, limit, H, G, HELD, ONE_SLOT
        )  # fmt: skip
    elif slack and member == 1:
        load_G, made = window(
            load_G, home_HG, hosted, threshold, ranks, slots, min_tokens, limit, H, G, HELD
        )
    elif slack:  # noqa: SIM102 - only what is a condition of its own is left out when compiled
        if MEMBERS > 2:
            halves, anchor = variant_of(member - 2)
            load_G, made = close_circles(
                load_G, home_HG, hosted, threshold,
                ranks, slots, min_tokens, limit, halves, anchor, H, G, HELD
            )  # fmt: skip
    served = loads_of(attempt_loads, domain, buffer, ranks, RUNGS, MEMBERS)
    tl.store(served + rank, load_G, mask=rank < ranks)
    if slack or member == 0:
        counts = counts_of(counts, domain, rung, member, RUNGS, MEMBERS, H, G)
        note(
            facts, hosted, counts, load_G, made, domain, rung, member, ranks, slots,
            H, G, HELD, RUNGS, MEMBERS
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["ranks", "slots", "min_tokens", "limit"],
    do_not_specialize_on_alignment=["home"],
)
def search(
    home,
    rates,
    expert_of_place,
    first_slot_of_rank,
    counts,
    attempts,
    attempt_loads,
    facts,
    outcomes,
    scratch,
    found,
    planned_loads,
    expert_of_slot,
    ranks,
    slots,
    min_tokens,
    limit,
    FIRST: tl.constexpr,
    TIMED: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    HELD: tl.constexpr,
    ONE_SLOT: tl.constexpr,
    RUNGS: tl.constexpr,
    MEMBERS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program (d, r): the best attempt at rung r of domain d; only the lowest rung is searched.

    With `FIRST`, it makes the first attempt itself. With `TIMED`, it only tells what that costs.

    Rank 1 hosts expert 0 for 3 tokens, as in the plan of `split`:

    >>> example(search, (1, 1), home=[[[6, 1], [1, 1]]], rates=torch.zeros(4, dtype=torch.int64),
    ...         expert_of_place=[0, 2, 1, 3], first_slot_of_rank=[0, 3, 6],
    ...         counts=scratch(1, 1, 1, 4), attempts=scratch(1, 4, 2, 2),
    ...         attempt_loads=scratch(1, 4, 2), facts=scratch(1, 1, 7),
    ...         outcomes=room(1, 1, 7), scratch=scratch(1, 12), found=room(2, 2),
    ...         planned_loads=room(2), expert_of_slot=[0, 1, 0, 2, 3, 0],
    ...         ranks=2, slots=1, min_tokens=1, limit=2, FIRST=True, TIMED=False,
    ...         H=2, G=2, HELD=2, ONE_SLOT=True, RUNGS=1, MEMBERS=1, STEP=4)
    found = [[2147483647, 0], [0, 3]]
    planned_loads = [4, 5]
    expert_of_slot = [0, 1, -1, 2, 3, -1]
    """
    domain = tl.program_id(0)
    rung = tl.program_id(1)
    attempts = attempts_of(attempts, domain, ranks * slots, RUNGS, MEMBERS)
    attempt_loads = loads_of(attempt_loads, domain, 0, ranks, RUNGS, MEMBERS)
    if FIRST:  # there is one domain, and no tolerance
        threshold, peak = try_alone(
            home, attempts, attempt_loads, domain,
            ranks, slots, min_tokens, limit, H, G, HELD, ONE_SLOT
        )  # fmt: skip
        best = threshold * 0
        alias_peak = peak
    else:
        best, threshold, peak = best_of_members(facts, rates, domain, rung, RUNGS, MEMBERS)
        best += rung * MEMBERS
        alias_peak = tl.load(measure_of(facts, domain, rung, 0, PEAK, RUNGS, MEMBERS))
    if (peak > threshold) & (rung == 0):
        best = least_that_is_met(
            home, attempts, attempt_loads, scratch, domain, best, peak, alias_peak, threshold,
            ranks, slots, min_tokens, limit, H, G, HELD, ONE_SLOT, RUNGS * MEMBERS, STEP
        )  # fmt: skip
    tl.debug_barrier()
    if TIMED:
        counts = counts_of(counts, domain, rung, 0, RUNGS, MEMBERS, H, G)
        tell_outcome(
            outcomes, home, attempts, attempt_loads, counts, domain, rung, best, threshold,
            ranks, slots, H, G, HELD, RUNGS, MEMBERS
        )  # fmt: skip
    else:
        publish(
            found, planned_loads, expert_of_slot, attempts, attempt_loads, expert_of_place,
            first_slot_of_rank, domain, best, ranks, slots, H, G, HELD
        )  # fmt: skip


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
def tell_outcome(
    outcomes, home, attempts, attempt_loads, counts, domain, rung, best, threshold, ranks, slots,
    H: tl.constexpr, G: tl.constexpr, HELD: tl.constexpr,
    RUNGS: tl.constexpr, MEMBERS: tl.constexpr
):  # fmt: skip
    """What the best attempt at a rung costs; and, by the lowest one, a plan without copies.

    The peak of the lowest rung is what it reaches. That of the others is their threshold, or as
    high as can be, if they do not meet it.
    """
    rank = tl.arange(0, G)
    held = ranks * slots
    hosted = attempt_of(attempts, best, held)
    fanout, egress, ingress = weigh(hosted, counts, ranks, slots, H, G, HELD)
    load_G = tl.load(attempt_loads + best * ranks + rank, mask=rank < ranks, other=0)
    slot = tl.arange(0, HELD)
    held_slots = tl.load(hosted + slot, mask=slot < held, other=-1) >= 0
    home_G = rank_loads_of(load_domain(home, domain, H, G))
    at = outcome_of(outcomes, domain, rung, MEASURED, RUNGS)
    tl.store(outcome_of(outcomes, domain, rung, BUFFER, RUNGS), best)
    peak = tl.max(load_G, 0)
    tl.store(at + PEAK, tl.where(rung == 0, peak, tl.where(peak > threshold, MOST, threshold)))
    tl.store(at + COPIES, tl.sum(held_slots.to(tl.int32), 0))
    tl.store(at + FANOUT, fanout)
    tl.store(at + EGRESS, egress)
    tl.store(at + INGRESS, ingress)
    tl.store(outcome_of(outcomes, domain, rung, AT_HOME, RUNGS), tl.max(home_G, 0))
    if rung == 0:
        empty = RUNGS * MEMBERS + 2
        free_all(attempt_of(attempts, empty, held), held, HELD)
        tl.store(attempt_loads + empty * ranks + rank, home_G, mask=rank < ranks)


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
