"""Layouts of the planner's buffers, per domain.

Without rates, all heuristics attempt one threshold. With rates, attempts are made at several
thresholds; the first attempt is exact.

    home            [D, H, G]   rows of the home experts (axis 1) of every rank (axis 2); -1: none
    attempts        [D, BUFFERS, 2, held]   for every spare slot the index of its expert in `home`
                    (row * G + column; -1: free), then all quotas
    attempt_loads   [D, BUFFERS, ranks]   rows that every rank serves in each attempt
    facts           [D, facts_size]   the threshold, whether it is above the mean, then for every
                    heuristic: peak, replicas, fan-out, egress
    outcomes        [D, attempts, OUTCOMES]   for every attempt: its buffer, peak, replicas, most
                    transfers of one rank, and the peak without replicas
    counts          [D, MEMBERS, H * G]   for `weigh`: replicas of every expert
    placed           [2, D * held]   the plan: expert of every spare slot (`MOST`: none), and quota
    scratch         [D, scratch_size]   for `bound`
    work            [D, H + 2, G]   for `groups`: rows at home, the hottest expert, free slots

With speeds, thresholds and peaks count thousandths of a row at nominal speed, in 64 bits, and so do
`facts`, `outcomes` and `scratch`. An attempt then works on rows above the limit of each rank, which
`relative_to` returns, with the threshold 0. Their buffer, which `Planner` fills:

    header          kind (`EQUAL` or `UNEQUAL`), period, unit, length of a row of `steps`, its place
    speeds          [D, ranks]
    steps           [D, 1 + ...]   the sum of all speeds in units, then the thresholds of one
                    period at which a limit grows by a row, in order

`held` is the number of spare slots of a domain and `ranks` its ranks; H and G are powers of two.
Buffers: one per heuristic or attempt, then two for the search, and one without replicas.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

MOST = tl.constexpr(2**31 - 1)
VARIANTS = tl.constexpr(4)  # of `close_circles`
THRESHOLD, SLACK, MEASURES = (tl.constexpr(number) for number in (0, 1, 2))
PARTS = tl.constexpr(1000000)  # of a threshold over a speed: one row
UNITS_PER_ROW = tl.constexpr(1000)  # of a threshold
MAX_THRESHOLD = tl.constexpr(2**31 * 100000)
BEFORE_SPEEDS = tl.constexpr(6)  # numbers; even, so that speeds are aligned
KIND, PERIOD, UNIT, ROW, STEPS = (tl.constexpr(number - 6) for number in range(5))
EQUAL, UNEQUAL = tl.constexpr(0), tl.constexpr(1)


class Problem(NamedTuple):
    """Limits of every attempt at a domain."""

    ranks: Any
    slots: Any
    min_tokens: Any
    limit: Any  # most replicas in the domain
    speeds: Any  # [D, ranks], between a header and `steps`; or None


class Shape(NamedTuple):
    """Compile-time sizes of a domain, padded to powers of two."""

    H: int
    G: int
    HELD: int
    ONE_SLOT: bool
    BUFFERS: int
    MEMBERS: int  # heuristics
    SPEEDS: bool = False  # whether ranks differ in speed


class Attempts(NamedTuple):
    """Buffers of attempts, of all domains."""

    attempts: Any
    attempt_loads: Any
    facts: Any
    outcomes: Any
    scratch: Any


@triton.jit
def held_by(problem):
    """Return the number of spare slots of a domain."""
    return problem.ranks * problem.slots


@triton.constexpr_function
def facts_size(MEMBERS):
    return 2 + 4 * MEMBERS


@triton.constexpr_function
def scratch_size(H, G):
    return 2 * (H + 1) * G


@triton.constexpr_function
def work_size(H, G):
    return (H + 2) * G


@triton.jit
def home_of(home, domain, SHAPE: tl.constexpr):
    return home + domain * SHAPE.H * SHAPE.G


@triton.jit
def load_domain(home, domain, SHAPE: tl.constexpr):
    """[H, G] rows of the home experts of every rank; -1: no expert."""
    row = tl.arange(0, SHAPE.H)[:, None]
    column = tl.arange(0, SHAPE.G)[None, :]
    return tl.load(home + (domain * SHAPE.H + row) * SHAPE.G + column)


@triton.jit
def at_domain(tried, domain, problem, SHAPE: tl.constexpr):
    """Return the buffers of one domain; `outcomes` are left as they are."""
    buffers = domain * SHAPE.BUFFERS
    return Attempts(
        tried.attempts + buffers * 2 * held_by(problem),
        tried.attempt_loads + buffers * problem.ranks,
        tried.facts + domain * facts_size(SHAPE.MEMBERS),
        tried.outcomes,
        tried.scratch + domain * scratch_size(SHAPE.H, SHAPE.G),
    )


@triton.jit
def attempt_of(attempts, buffer, problem):
    """Return one of the attempts at a domain."""
    return attempts + buffer * 2 * held_by(problem)


@triton.jit
def quotas_of(attempt, problem):
    """Return the second half of an attempt."""
    return attempt + held_by(problem)


@triton.jit
def store_threshold(tried, threshold, slack):
    """Store the threshold, and whether it is above the mean of the domain."""
    tl.store(tried.facts + THRESHOLD, threshold)
    tl.store(tried.facts + SLACK, slack.to(tl.int32))


@triton.jit
def counts_of(counts, domain, member, SHAPE: tl.constexpr):
    return counts + (domain * SHAPE.MEMBERS + member) * SHAPE.H * SHAPE.G


@triton.jit
def heats_of(work, SHAPE: tl.constexpr):
    """[G] rows of the hottest expert at home of every rank."""
    return work + SHAPE.H * SHAPE.G


@triton.jit
def free_of(work, SHAPE: tl.constexpr):
    """[G] free slots of every rank."""
    return work + (SHAPE.H + 1) * SHAPE.G


@triton.jit
def rank_loads_of(home_HG):
    """[G] rows of every rank without replicas."""
    return tl.sum(tl.maximum(home_HG, 0), 0)


@triton.jit
def planned_elsewhere(speeds, SHAPE: tl.constexpr):
    """Whether the plan is left to the kernel for the other kind of speeds, equal or unequal.

    A graph captures both kernels, so the kind may change. Kernels load their tile before they wait
    for the kind.
    """
    kind = tl.load(speeds + KIND)
    if SHAPE.SPEEDS:
        return kind == EQUAL
    else:  # noqa: RET505 - without `else`, Triton compiles both
        return kind != EQUAL


@triton.jit
def speeds_of(domain, problem, SHAPE: tl.constexpr):
    """[G] speeds of the ranks of a domain, 64-bit; 0: no rank.

    Loaded as a tile, so that they have the layout of loads, which are sums of a tile. Otherwise the
    loop of `alias` converts between two layouts in every step.
    """
    rank = tl.arange(0, SHAPE.G)[None, :]
    at_G = problem.speeds + domain * problem.ranks + rank
    return tl.sum(tl.load(at_G, mask=rank < problem.ranks, other=0).to(tl.int64), 0)


@triton.jit
def relative_to(load_G, threshold, domain, problem, SHAPE: tl.constexpr):
    """Return loads and a threshold that is the limit of all ranks, for one attempt.

    With speeds: rows above the limit of each rank, and 0.
    """
    if SHAPE.SPEEDS:
        speed_G = speeds_of(domain, problem, SHAPE)
        limit_G = tl.minimum(tl.minimum(threshold, MAX_THRESHOLD) * speed_G // PARTS, MOST)
        return load_G - limit_G.to(tl.int32), tl.zeros((), tl.int32)
    else:  # noqa: RET505 - without `else`, Triton compiles both
        return load_G, threshold


@triton.jit
def loads_after(load_G, start_G, end_G, SHAPE: tl.constexpr):
    """[G] rows of every rank after an attempt at the loads `start_G` of `relative_to`."""
    if SHAPE.SPEEDS:
        return load_G + (end_G - start_G)
    else:  # noqa: RET505
        return end_G


@triton.jit
def most_rows(load_G, start_G, limit, SHAPE: tl.constexpr):
    """Return the most rows that a rank has, or may have, in an attempt."""
    if SHAPE.SPEEDS:
        return tl.maximum(tl.max(load_G, 0), tl.max(load_G - start_G, 0))
    else:  # noqa: RET505
        return tl.maximum(tl.max(load_G, 0), limit)


@triton.jit
def peak_of(load_G, domain, problem, SHAPE: tl.constexpr):
    """Return the least threshold that allows these loads."""
    if SHAPE.SPEEDS:
        speed_G = tl.maximum(speeds_of(domain, problem, SHAPE), 1)
        return tl.max(quotient(load_G.to(tl.int64) * PARTS + speed_G - 1, speed_G), 0)
    else:  # noqa: RET505
        return tl.max(load_G, 0)


@triton.jit
def quotient(numbers, divisors):
    """Return whole quotients of numbers below 2**53, without the slow division of 64-bit integers.

    Exact: rounding moves a quotient by less than its distance from the next whole number.
    """
    return (numbers.to(tl.float64) / divisors.to(tl.float64)).to(tl.int64)


@triton.jit
def mean_of(load_G, domain, problem, SHAPE: tl.constexpr):
    """Return the mean load of a rank, rounded up; with speeds the least threshold for all rows."""
    if SHAPE.SPEEDS:
        return least_threshold(tl.sum(load_G, 0), domain, problem)
    else:  # noqa: RET505
        ranks = problem.ranks
        return ((tl.sum(load_G.to(tl.int64), 0) + ranks - 1) // ranks).to(tl.int32)


@triton.jit
def shared_threshold(
    load_G, home, domains, parts, problem, SHAPE: tl.constexpr, STEP: tl.constexpr
):
    """Return the threshold: the mean of the heaviest domain plus the tolerance.

    load_G: loads of any one domain.
    """
    if SHAPE.SPEEDS:
        return shared_threshold_of_speeds(home, domains, parts, problem, SHAPE, STEP)
    else:  # noqa: RET505
        most = tl.sum(load_G.to(tl.int64), 0)
        if domains > 1:
            place = tl.arange(0, SHAPE.H * SHAPE.G)[None, :]
            for begin in range(0, domains, STEP):
                domain = begin + tl.arange(0, STEP)[:, None]
                tokens = tl.load(
                    home + domain * (SHAPE.H * SHAPE.G) + place, mask=domain < domains, other=0
                )
                total = tl.sum(tl.maximum(tokens, 0).to(tl.int64), 1)
                most = tl.maximum(most, tl.max(total, 0))
        return threshold_of(most, problem.ranks, parts)


@triton.jit
def shared_threshold_of_speeds(
    home, domains, parts, problem, SHAPE: tl.constexpr, STEP: tl.constexpr
):
    """Return the highest threshold of all domains, each plus the tolerance."""
    place = tl.arange(0, SHAPE.H * SHAPE.G)[None, :]
    most = tl.zeros((), tl.int64)
    for begin in range(0, domains, STEP):
        domain_S = begin + tl.arange(0, STEP)
        at_SP = home + domain_S[:, None] * (SHAPE.H * SHAPE.G) + place
        tokens_SP = tl.load(at_SP, mask=domain_S[:, None] < domains, other=0)
        total_S = tl.sum(tl.maximum(tokens_SP, 0), 1)
        own_S = threshold_of_speeds(total_S, tl.minimum(domain_S, domains - 1), parts, problem)
        most = tl.maximum(most, tl.max(own_S, 0))
    return most


@triton.jit
def threshold_of_speeds(total, domain, parts, problem):
    """Return the threshold of a domain, or of several, with this many rows, plus `parts`."""
    weight = tl.load(steps_of(domain, problem)) * tl.load(problem.speeds + UNIT)
    allowed = total.to(tl.int64) * (PARTS + parts) // weight
    return tl.maximum(least_threshold(total, domain, problem), allowed)


@triton.jit
def least_threshold(total, domain, problem):
    """Return the least threshold whose limits together allow all rows; twin of `Domain.mean`.

    Whole periods allow a multiple of the sum of all speeds; a table has the rest.
    """
    steps = steps_of(domain, problem)
    total = total.to(tl.int32)  # divisions of 64 bits are slow
    weight = tl.load(steps).to(tl.int32)
    periods = tl.maximum(total - 1, 0) // weight
    step = tl.load(steps + (total - periods * weight), mask=total > 0, other=0)
    return periods * tl.load(problem.speeds + PERIOD) + step


@triton.jit
def steps_of(domain, problem):
    """Return the row of a domain in `steps`."""
    at = tl.load(problem.speeds + STEPS) + domain * tl.load(problem.speeds + ROW)
    return problem.speeds + at


@triton.jit
def threshold_of(total, ranks, parts):
    """Return the mean load of a rank, rounded up, plus `parts` millionths of it."""
    mean = (total + ranks - 1) // ranks
    allowed = total * (1000000 + parts) // (ranks.to(tl.int64) * 1000000)
    # A threshold above all rows would need more than 32 bits.
    return tl.minimum(tl.maximum(mean, allowed), MOST).to(tl.int32)
