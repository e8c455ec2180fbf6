"""Layouts of the planner's buffers, per domain.

With rates, attempts are made at several thresholds; the first attempt is exact.

    home            [D, H, G]   rows of the home experts (axis 1) of every rank (axis 2); -1: none
    attempts        [D, BUFFERS, 2, held]   for every spare slot the index of its expert in `home`
                    (row * G + column; -1: free), then all quotas
    attempt_loads   [D, BUFFERS, ranks]   rows that every rank serves in each attempt
    outcomes        [D, attempts, OUTCOMES]   for every attempt: its buffer, peak, replicas, most
                    transfers of one rank, and the peak without replicas
    counts          [D, H * G]   replicas of every expert, for `most_replicated`
    placed          [2, D * held]   the plan: expert of every spare slot (`MOST`: none), and quota
    scratch         [D, scratch_size]   for `bound`

With speeds, thresholds and peaks count thousandths of a row at nominal speed, in 64 bits, and so do
`outcomes` and `scratch`. An attempt then works on rows above the limit of each rank, which
`relative_to` returns, with the threshold 0. Their buffer, which `Planner` fills:

    header          unused, period, unit, length of a row of `steps`
    speeds          [D, ranks]
    sums            [D]   of all speeds of a domain, in units
    steps           [D, row]   the thresholds of one period at which a limit grows by a row, in
                    order

`held` is the number of spare slots of a domain and `ranks` its ranks; H and G are powers of two.
Buffers: one per attempt, then two for the search, and one without replicas.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

MOST = tl.constexpr(2**31 - 1)
PARTS = tl.constexpr(1000000)  # of a threshold over a speed: one row
QUICK_PARTS = tl.constexpr(3000000)  # of 2**31 rows, with the rows themselves less than 2**53
UNITS_PER_ROW = tl.constexpr(1000)  # of a threshold
MAX_THRESHOLD = tl.constexpr(2**31 * 100000)
BEFORE_SPEEDS = tl.constexpr(4)  # numbers; even, so that speeds are aligned
PERIOD, UNIT, ROW = (tl.constexpr(number - 3) for number in range(3))


class Problem(NamedTuple):
    """Limits of every attempt at a domain."""

    ranks: Any
    slots: Any
    min_tokens: Any
    limit: Any  # most replicas in the domain
    speeds: Any  # `Speeds`, or 0; Triton 3.6 cannot return None


class Speeds(NamedTuple):
    """Of the ranks of a domain, and what all domains share."""

    of_rank: Any  # [G] 64-bit; 0: no rank
    sum: Any  # of all ranks, in units
    table: Any  # [D, ranks], in memory
    sums: Any  # [D], in memory
    period: Any
    unit: Any
    row: Any


class Shape(NamedTuple):
    """Compile-time sizes of a domain, padded to powers of two."""

    H: int
    G: int
    HELD: int
    ONE_SLOT: bool
    BUFFERS: int
    SPEEDS: bool = False  # whether ranks differ in speed


class Attempts(NamedTuple):
    """Buffers of attempts, of all domains."""

    attempts: Any
    attempt_loads: Any
    outcomes: Any
    scratch: Any


@triton.jit
def held_by(problem):
    """Return the number of spare slots of a domain."""
    return problem.ranks * problem.slots


@triton.constexpr_function
def scratch_size(H, G):
    return 2 * (H + 1) * G


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
def rank_loads_of(home_HG):
    """[G] rows of every rank without replicas."""
    return tl.sum(tl.maximum(home_HG, 0), 0)


@triton.jit
def problem_of(domain, ranks, slots, min_tokens, limit, speeds, SHAPE: tl.constexpr):
    """Return the limits of a domain; called before any branch, so that all loads start at once."""
    if SHAPE.SPEEDS:
        sums = speeds + tl.num_programs(0) * ranks
        period, unit, row = tl.load(speeds + PERIOD), tl.load(speeds + UNIT), tl.load(speeds + ROW)
        speed_G = load_speeds(speeds, domain, ranks, SHAPE)
        own = Speeds(speed_G, tl.load(sums + domain), speeds, sums, period, unit, row)
        return Problem(ranks, slots, min_tokens, limit, own)
    else:  # noqa: RET505 - without `else`, Triton compiles both
        return Problem(ranks, slots, min_tokens, limit, 0)


@triton.jit
def load_speeds(speeds, domain, ranks, SHAPE: tl.constexpr):
    """[G] speeds of the ranks of a domain.

    Loaded as a tile, so that they have the layout of loads, which are sums of a tile. Otherwise the
    loop of `alias` converts between two layouts in every step.
    """
    rank = tl.arange(0, SHAPE.G)[None, :]
    at_G = speeds + domain * ranks + rank
    return tl.sum(tl.load(at_G, mask=rank < ranks, other=0).to(tl.int64), 0)


@triton.jit
def reloaded(problem, domain, SHAPE: tl.constexpr):
    """Return the problem with speeds that are loaded once more.

    For loads from memory, which have another layout: speeds in both layouts would take registers
    during all attempts.
    """
    if SHAPE.SPEEDS:
        old = problem.speeds
        speed_G = load_speeds(old.table, domain, problem.ranks, SHAPE)
        own = Speeds(speed_G, old.sum, old.table, old.sums, old.period, old.unit, old.row)
        return Problem(problem.ranks, problem.slots, problem.min_tokens, problem.limit, own)
    else:  # noqa: RET505
        return problem


@triton.jit
def relative_to(load_G, threshold, problem, SHAPE: tl.constexpr):
    """Return loads and a threshold that is the limit of all ranks, for one attempt.

    With speeds: rows above the limit of each rank, and 0.
    """
    if SHAPE.SPEEDS:
        rows_G = tl.minimum(threshold, MAX_THRESHOLD) * problem.speeds.of_rank // PARTS
        limit_G = tl.minimum(rows_G, MOST)
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
def peak_of(load_G, problem, SHAPE: tl.constexpr):
    """Return the least threshold that allows these loads."""
    if SHAPE.SPEEDS:
        speed_G = tl.maximum(problem.speeds.of_rank, 1)
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
        return least_threshold(tl.sum(load_G, 0), domain, problem.speeds.sum, problem)
    else:  # noqa: RET505
        ranks = problem.ranks
        return ((tl.sum(load_G.to(tl.int64), 0) + ranks - 1) // ranks).to(tl.int32)


@triton.jit
def shared_threshold(
    load_G, home, domain, domains, parts, problem, SHAPE: tl.constexpr, STEP: tl.constexpr
):
    """Return the threshold: the mean of the heaviest domain plus the tolerance.

    load_G: loads of this domain.
    """
    total = tl.sum(load_G.to(tl.int64), 0)
    if SHAPE.SPEEDS:
        most = threshold_of_speeds(total, domain, problem.speeds.sum, parts, problem)
    else:
        most = total
    if domains > 1:
        place = tl.arange(0, SHAPE.H * SHAPE.G)[None, :]
        for begin in range(0, domains, STEP):
            domain_S = begin + tl.arange(0, STEP)
            at_SP = home + domain_S[:, None] * (SHAPE.H * SHAPE.G) + place
            tokens_SP = tl.load(at_SP, mask=domain_S[:, None] < domains, other=0)
            measure_S = tl.sum(tl.maximum(tokens_SP, 0).to(tl.int64), 1)
            if SHAPE.SPEEDS:
                known_S = tl.minimum(domain_S, domains - 1)
                sum_S = tl.load(problem.speeds.sums + known_S)
                measure_S = threshold_of_speeds(measure_S, known_S, sum_S, parts, problem)
            most = tl.maximum(most, tl.max(measure_S, 0))
    if SHAPE.SPEEDS:
        return most
    else:  # noqa: RET505
        return threshold_of(most, problem.ranks, parts)


@triton.jit
def threshold_of_speeds(total, domain, sum_of_speeds, parts, problem):
    """Return the threshold of a domain, or of several, with this many rows, plus `parts`."""
    allowed = with_tolerance(total, parts, sum_of_speeds * problem.speeds.unit)
    return tl.maximum(least_threshold(total, domain, sum_of_speeds, problem), allowed)


@triton.jit
def least_threshold(total, domain, sum_of_speeds, problem):
    """Return the least threshold whose limits together allow all rows; twin of `Domain.mean`.

    Whole periods allow a multiple of the sum of all speeds; a table has the rest.
    """
    total, weight = total.to(tl.int32), sum_of_speeds.to(tl.int32)  # 64-bit divisions are slow
    periods = tl.maximum(total - 1, 0) // weight
    steps = problem.speeds.sums + tl.num_programs(0) + domain * problem.speeds.row
    step = tl.load(steps + (total - periods * weight - 1), mask=total > 0, other=0)
    return periods * problem.speeds.period + step


@triton.jit
def threshold_of(total, ranks, parts):
    """Return the mean load of a rank, rounded up, plus `parts` millionths of it."""
    ranks = ranks.to(tl.int64)
    allowed = with_tolerance(total, parts, ranks * PARTS)
    # A threshold above all rows would need more than 32 bits.
    return tl.minimum(tl.maximum(quotient(total + ranks - 1, ranks), allowed), MOST).to(tl.int32)


@triton.jit
def with_tolerance(total, parts, weight):
    """Return these rows plus `parts` millionths of them, in millionths, by `weight`."""
    numbers = total.to(tl.int64) * (PARTS + parts)
    allowed = quotient(numbers, weight)
    if parts > QUICK_PARTS:
        allowed = numbers // weight
    return allowed
