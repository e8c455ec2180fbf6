"""Layouts of what the planner notes while it plans, of every domain.

Without rates, all members of the portfolio attempt one threshold. With rates, attempts are made at
several thresholds; the first one is exact.

    home            [D, H, G]   tokens of the home experts (rows) of its ranks (columns); -1: none
    attempts        [D, BUFFERS, 2, held]   of every spare slot: the place of its expert in `home`
                    (row * G + column; -1: the slot stays free), then all quotas
    attempt_loads   [D, BUFFERS, ranks]   tokens that every rank serves by each attempt
    facts           [D, facts_size]   the threshold, whether it is above the mean, then the
                    measures of the attempt of every member: peak, copies, fan-out, egress
    outcomes        [D, attempts, OUTCOMES]   the buffer of an attempt, its peak, copies, most
                    transfers of one rank, and the peak with all tokens at home
    counts          [D, MEMBERS, H * G]   for `weigh`: copies of every expert
    found           [2, D * held]   the best: the expert of every spare slot (`MOST`: none), quotas
    scratch         [D, scratch_size]   for `bound`
    work            [D, H + 2, G]   for `groups`: tokens at home, the hottest, free slots

`held` are the spare slots of a domain, `ranks` its ranks, H and G their homes and number, padded.
Buffers: one of every member or attempt, then two to try again, and one without copies.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

MOST = tl.constexpr(2**31 - 1)
VARIANTS = tl.constexpr(4)  # of members that close circles
THRESHOLD, SLACK, MEASURES = (tl.constexpr(number) for number in (0, 1, 2))
PEAK, COPIES, FANOUT, EGRESS = (tl.constexpr(number) for number in range(4))
BUFFER, REACHED, MADE, TRANSFERS, AT_HOME, OUTCOMES = (tl.constexpr(n) for n in range(6))


class Problem(NamedTuple):
    """What every attempt at a domain keeps to."""

    ranks: Any
    slots: Any
    min_tokens: Any
    limit: Any  # most copies of the domain


class Shape(NamedTuple):
    """What kernels that attempt a plan are compiled for: sizes of a domain, padded."""

    H: int
    G: int
    HELD: int
    ONE_SLOT: bool
    BUFFERS: int


@triton.constexpr_function
def shape_of(H, G, HELD, ONE_SLOT, BUFFERS):
    return Shape(H, G, HELD, ONE_SLOT, BUFFERS)


@triton.jit
def held_by(problem):
    """Spare slots of a domain."""
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
    """[H, G] tokens of the home experts of every rank; -1: there is none."""
    row = tl.arange(0, SHAPE.H)[:, None]
    column = tl.arange(0, SHAPE.G)[None, :]
    return tl.load(home + (domain * SHAPE.H + row) * SHAPE.G + column)


@triton.jit
def attempts_of(attempts, domain, problem, SHAPE: tl.constexpr):
    """All attempts at a domain."""
    return attempts + domain * SHAPE.BUFFERS * 2 * held_by(problem)


@triton.jit
def attempt_of(attempts, buffer, problem):
    """One of the attempts at a domain."""
    return attempts + buffer * 2 * held_by(problem)


@triton.jit
def quotas_of(attempt, problem):
    """The second half of an attempt."""
    return attempt + held_by(problem)


@triton.jit
def loads_of(attempt_loads, domain, buffer, problem, SHAPE: tl.constexpr):
    return attempt_loads + (domain * SHAPE.BUFFERS + buffer) * problem.ranks


@triton.jit
def fact_of(facts, domain, name, MEMBERS: tl.constexpr):
    """One of the facts."""
    return facts + domain * facts_size(MEMBERS) + name


@triton.jit
def measure_of(facts, domain, member, name, MEMBERS: tl.constexpr):
    """One of the measures of a member's attempt."""
    return fact_of(facts, domain, MEASURES + 4 * member + name, MEMBERS)


@triton.jit
def outcome_of(outcomes, domain, number, attempts):
    return outcomes + (domain * attempts + number) * OUTCOMES


@triton.jit
def counts_of(counts, domain, member, MEMBERS: tl.constexpr, SHAPE: tl.constexpr):
    return counts + (domain * MEMBERS + member) * SHAPE.H * SHAPE.G


@triton.jit
def found_quotas_of(found, spare_slots):
    """The second half of `found`, behind the spare slots of all domains."""
    return found + spare_slots


@triton.jit
def scratch_of(scratch, domain, SHAPE: tl.constexpr):
    return scratch + domain * scratch_size(SHAPE.H, SHAPE.G)


@triton.jit
def work_of(work, domain, SHAPE: tl.constexpr):
    return work + domain * work_size(SHAPE.H, SHAPE.G)


@triton.jit
def heats_of(work, SHAPE: tl.constexpr):
    """[G] tokens of the hottest expert at home, of every rank."""
    return work + SHAPE.H * SHAPE.G


@triton.jit
def free_of(work, SHAPE: tl.constexpr):
    """[G] the free slots of every rank."""
    return work + (SHAPE.H + 1) * SHAPE.G


@triton.jit
def rank_loads_of(home_HG):
    """[G] tokens of every rank, with all of them at home."""
    return tl.sum(tl.maximum(home_HG, 0), 0)


@triton.jit
def mean_of(load_G, ranks):
    """The mean load of a rank, rounded up."""
    return ((tl.sum(load_G.to(tl.int64), 0) + ranks - 1) // ranks).to(tl.int32)


@triton.jit
def shared_threshold(
    load_G, home, domains, parts, problem, SHAPE: tl.constexpr, STEP: tl.constexpr
):
    """What no rank shall exceed: the heaviest domain's mean, rounded up, and the tolerance.

    load_G: of one of the domains.
    """
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
def threshold_of(total, ranks, parts):
    """The mean load of a rank, rounded up, and as many millionths of it more."""
    mean = (total + ranks - 1) // ranks
    allowed = total * (1000000 + parts) // (ranks.to(tl.int64) * 1000000)
    # More than all tokens is never exceeded either, and needs more than 32 bits.
    return tl.minimum(tl.maximum(mean, allowed), MOST).to(tl.int32)
