"""Twin of `quickest` in `reference/search.py`: all attempts side by side, and the quickest plan."""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels import search, state
from ultraep.backends.triton.kernels.attempts import alias_packed_or_not, free_all
from ultraep.backends.triton.kernels.search import PlanOut
from ultraep.backends.triton.kernels.state import MOST, UNITS_PER_ROW, Attempts

# For every attempt: its buffer, peak, replicas, most transfers of one rank, peak without replicas.
BUFFER, REACHED, MADE, TRANSFERS, AT_HOME, OUTCOMES = (tl.constexpr(n) for n in range(6))
FEWEST = tl.constexpr(0)  # as links: as few as the threshold needs
MOST_TIME = tl.constexpr(2**63 - 1)
LIMITED = tl.constexpr(3)  # attempts after the exact one that need fewer transfers to count


@triton.jit
def outcome_of(outcomes, domain, number, attempts):
    return outcomes + (domain * attempts + number) * OUTCOMES


@triton.jit
def store_outcome(outcome, buffer, peak, num_replicas, transfers):
    tl.store(outcome + BUFFER, buffer)
    tl.store(outcome + REACHED, peak)
    tl.store(outcome + MADE, num_replicas)
    tl.store(outcome + TRANSFERS, transfers)


@triton.jit
def links_of(number, copy):
    """Return the links of an attempt; see `attempts_of` in the reference."""
    fewest = tl.where(copy > 0, FEWEST, MOST)
    return tl.where(number == 2, 1, tl.where(number == 3, 2, fewest))


# For the alignment of `home`, see `search`.
@triton.jit(
    do_not_specialize=["domains", "ranks", "slots", "min_tokens", "limit"],
    do_not_specialize_on_alignment=["home", "counts"],
)
def plan_by_time(
    home,
    counts,
    tolerances,
    rates,
    tried: Attempts,
    finished,
    plan: PlanOut,
    domains,
    ranks,
    slots,
    min_tokens,
    limit,
    speeds,
    SHAPE: tl.constexpr,
    PADDED: tl.constexpr,
    STEP: tl.constexpr,
    SEARCH_STEP: tl.constexpr,
):
    """Program (d, n): attempt n at domain d; attempt 0 is exact.

    The last program to finish publishes the quickest plan.   finished: 0.   PADDED: see
    `quickest_of`.

    Rank 0 gives 3 rows with no tolerance, and 1 row at 40 %. Two rows fewer on the fullest rank
    save 200; a replica costs 500:

    >>> example(plan_by_time, (1, 2), home=[[[6, 1], [1, 1]]], tolerances=[0, 400000],
    ...         rates=torch.tensor([100, 500, 0, 0]), attempt_loads=empty(1, 5, 2),
    ...         outcomes=empty(1, 2, 5), finished=[0], placed=empty(2, 2), planned_loads=empty(2),
    ...         expert_of_slot=[0, 1, 0, 2, 3, 0], SHAPE=shape(BUFFERS=5), PADDED=2, STEP=1,
    ...         SEARCH_STEP=4)
    attempt_loads = [[[4, 5], [6, 3], [_, _], [_, _], [7, 2]]]
    outcomes = [[[0, 5, 1, 1, 7], [1, 6, 1, 1, 7]]]
    placed = [[2147483647, 2147483647], [0, 0]]
    planned_loads = [7, 2]
    expert_of_slot = [0, 1, -1, 2, 3, -1]
    """
    domain = tl.program_id(0)
    number = tl.program_id(1)
    rank = tl.arange(0, SHAPE.G)
    problem = state.problem_of(domain, ranks, slots, min_tokens, limit, speeds, SHAPE)
    home_HG = state.load_domain(home, domain, SHAPE)
    load_G = state.rank_loads_of(home_HG)
    parts = tl.load(tolerances + number)
    threshold = state.shared_threshold(load_G, home, domain, domains, parts, problem, SHAPE, STEP)
    own = state.at_domain(tried, domain, problem, SHAPE)
    loads = own.attempt_loads
    outcome = outcome_of(tried.outcomes, domain, number, tl.num_programs(1))
    tl.store(outcome + AT_HOME, state.peak_of(load_G, problem, SHAPE))
    links = ranks * 0 + MOST
    if number > 0:
        links = links_of(number, tl.load(rates + 1))
        home_HG, threshold, links = keep_hottest(home_HG, load_G, threshold, links, problem, SHAPE)
    if number == 0:
        free_all(state.attempt_of(own.attempts, SHAPE.BUFFERS - 1, problem), problem, SHAPE)
        tl.store(loads + (SHAPE.BUFFERS - 1) * ranks + rank, load_G, mask=rank < ranks)
    start_G, most_of_rank = state.relative_to(load_G, threshold, problem, SHAPE)
    slack = search.slack_of(start_G, most_of_rank, problem)
    most = state.most_rows(load_G, start_G, most_of_rank, SHAPE)
    hosted = state.attempt_of(own.attempts, number, problem)
    usable = tl.minimum(slots, links)
    end_G = start_G
    num_replicas = ranks * 0
    received = num_replicas
    if (number > 0) & (slack >= ranks):
        end_G, home_HG, num_replicas, received = alias_packed_or_not(
            start_G, home_HG, hosted, most_of_rank, most, slack, usable, problem, SHAPE, True
        )
    else:
        end_G, home_HG, num_replicas, received = alias_packed_or_not(
            start_G, home_HG, hosted, most_of_rank, most, slack, usable, problem, SHAPE, False
        )
    load_G = state.loads_after(load_G, start_G, end_G, SHAPE)
    tl.store(loads + number * ranks + rank, load_G, mask=rank < ranks)
    num_given = most_given(home_HG, state.load_domain(home, domain, SHAPE))
    transfers = tl.maximum(num_given, received)
    if number == 0:
        solve(
            outcome, home, counts, own, domain, threshold, transfers, num_replicas, problem,
            SHAPE, SEARCH_STEP
        )  # fmt: skip
    else:
        peak = tl.where(tl.max(end_G, 0) > most_of_rank, unmet(SHAPE.SPEEDS), threshold)
        store_outcome(outcome, number, peak, num_replicas, transfers)
    tl.debug_barrier()  # all stores of this program are in memory
    before = tl.atomic_add(finished, 1, sem="acq_rel")
    if before == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(finished, 0)
        publish_quickest(plan, tried, rates, domains, tl.num_programs(1), problem, SHAPE, PADDED)


@triton.jit
def publish_quickest(
    plan, tried, rates, domains, attempts, problem, SHAPE: tl.constexpr, PADDED: tl.constexpr
):
    """Write the quickest attempt of all domains, or no replicas."""
    chosen = quickest_of(tried.outcomes, rates, domains, attempts, PADDED, SHAPE.SPEEDS)
    for index in range(domains):
        best = SHAPE.BUFFERS - 1
        if chosen >= 0:
            at = outcome_of(tried.outcomes, index, chosen, attempts)
            best = tl.load(at + BUFFER, cache_modifier=".cg").to(tl.int32)
        of_domain = state.at_domain(tried, index, problem, SHAPE)
        search.publish(plan, of_domain, index, best, problem, SHAPE)


@triton.jit
def keep_hottest(home_HG, load_G, threshold, links, problem, SHAPE: tl.constexpr):
    """Let every rank give away its hottest experts only, one per link; the others become -1.

    Returns rows at home, the threshold or the least one that so few links can meet, and the links.
    """
    H: tl.constexpr = SHAPE.H
    row = tl.arange(0, H)[:, None]
    start_G, limit = state.relative_to(load_G, threshold, problem, SHAPE)
    rest_G = start_G - limit
    left_HG = home_HG
    number = 0
    if links == MOST:
        left_HG = left_HG * 0 - 2
    going = (links == FEWEST) & (tl.max(rest_G, 0) > 0) | (links != FEWEST) & (links != MOST)
    while going:
        most_G = tl.max(left_HG, 0)
        hot_G = tl.min(tl.where(left_HG == most_G[None, :], row, H), 0)
        left_HG = tl.where(row == hot_G[None, :], -2, left_HG)
        rest_G -= tl.maximum(most_G, 0)
        number += 1
        # All experts at most: loads of a rank that is gone may be any numbers.
        going = tl.where(links == FEWEST, tl.max(rest_G, 0) > 0, number < links) & (number < H)
    home_HG = tl.where(left_HG == -2, home_HG, -1)
    floor = tl.maximum(tl.max(rest_G, 0), 0)
    if SHAPE.SPEEDS:
        floor = floor.to(tl.int64)
        if (floor > 0) & (links != MOST):
            floor = state.peak_of(rest_G + (load_G - start_G), problem, SHAPE) - threshold
    floor = tl.where(links == MOST, 0, floor)
    return home_HG, threshold + floor, tl.where(links == MOST, MOST, tl.maximum(number, 1))


@triton.jit
def most_given(home_HG, before_HG):
    """Return the most experts that one rank gave rows of; -1 in `home_HG`: not allowed."""
    given_HG = (home_HG >= 0) & (home_HG != before_HG)
    return tl.max(tl.sum(given_HG.to(tl.int32), 0), 0)


@triton.jit
def solve(
    outcome, home, counts, tried, domain, threshold, transfers, num_replicas, problem,
    SHAPE: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Write the outcome of the first attempt, or of the search above its threshold.

    transfers, num_replicas: of the first attempt.
    """
    rank, slot = tl.arange(0, SHAPE.G), tl.arange(0, SHAPE.HELD)
    tl.debug_barrier()
    problem = state.reloaded(problem, domain, SHAPE)
    load_G = tl.load(tried.attempt_loads + rank, mask=rank < problem.ranks, other=0)
    peak = state.peak_of(load_G, problem, SHAPE)
    best = 0
    if peak > threshold:
        best = search.least_that_is_met(home, tried, domain, peak, threshold, problem, SHAPE, STEP)
        tl.debug_barrier()
        hosted = state.attempt_of(tried.attempts, best, problem)
        loads = tried.attempt_loads + best * problem.ranks
        load_G = tl.load(loads + rank, mask=rank < problem.ranks, other=0)
        peak = state.peak_of(load_G, problem, SHAPE)
        holds = tl.load(hosted + slot, mask=slot < state.held_by(problem), other=-1) >= 0
        num_replicas = tl.sum(holds.to(tl.int32), 0)
        own_counts = counts + domain * SHAPE.H * SHAPE.G
        num_given = most_replicated(hosted, own_counts, problem, SHAPE)
        transfers = tl.maximum(num_given, tl.max(received_by(hosted, problem, SHAPE), 0))
    store_outcome(outcome, best, peak, num_replicas, transfers)


@triton.jit
def most_replicated(hosted, counts, problem, SHAPE: tl.constexpr):
    """Return the most experts of one rank that have replicas in an attempt.

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
    replicas_HG = tl.load(counts + at_HG, cache_modifier=".cg")
    return tl.max(tl.sum((replicas_HG > 0).to(tl.int32), 0), 0)


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
def quickest_of(outcomes, rates, domains, attempts, PADDED: tl.constexpr, SPEEDS: tl.constexpr):
    """Return the number of the attempt that is quickest over all domains; -1: no replicas.

    rates: row, copy, each and layer, 64-bit.   PADDED: the number of attempts as a power of two.
    """
    number = tl.arange(0, PADDED)
    known = number < attempts
    peak_N = tl.zeros((PADDED,), tl.int64)
    replicas_N = tl.zeros((PADDED,), tl.int64)
    transfers_N = tl.zeros((PADDED,), tl.int64)
    home_N = tl.zeros((PADDED,), tl.int64)
    for domain in range(domains):
        at = outcome_of(outcomes, domain, number, attempts)
        peak_N = tl.maximum(peak_N, load_shared(at + REACHED, known))
        replicas_N += load_shared(at + MADE, known)
        transfers_N = tl.maximum(transfers_N, load_shared(at + TRANSFERS, known))
        home_N = tl.maximum(home_N, load_shared(at + AT_HOME, known))
    row = tl.load(rates)
    copy = tl.load(rates + 1)
    time_N = time_of(row, peak_N, SPEEDS) + copy * transfers_N + tl.load(rates + 2) * replicas_N
    time_N += tl.where(replicas_N > 0, tl.load(rates + 3), 0)
    exact = tl.sum(tl.where(number == 0, transfers_N, 0), 0)
    limited_N = (number > 0) & (number <= LIMITED)
    fewer_N = (transfers_N < exact) & (copy > 0)
    left_N = known & (~limited_N | fewer_N) & ((number == 0) | (peak_N < unmet(SPEEDS)))
    time = tl.min(tl.where(left_N, time_N, MOST_TIME), 0)
    left_N = left_N & (time_N == time)
    left_N = left_N & (replicas_N == tl.min(tl.where(left_N, replicas_N, MOST), 0))
    chosen = tl.min(tl.where(left_N, number, PADDED), 0)
    return tl.where(time_of(row, tl.max(home_N, 0), SPEEDS) <= time, -1, chosen)


@triton.jit
def time_of(row, peak, SPEEDS: tl.constexpr):
    """Return the time of the rows; with speeds without products of more than 63 bits."""
    if SPEEDS:
        part = row * (peak % UNITS_PER_ROW) // UNITS_PER_ROW
        return row * (peak // UNITS_PER_ROW) + part
    else:  # noqa: RET505 - without `else`, Triton compiles both
        return row * peak


@triton.constexpr_function
def unmet(SPEEDS):
    """Return the peak of an attempt that does not meet its threshold."""
    return 1 << 62 if SPEEDS else (1 << 31) - 1


@triton.jit
def load_shared(at, mask):
    """Load what other programs of the same launch have stored."""
    return tl.load(at, mask=mask, other=0, cache_modifier=".cg")
