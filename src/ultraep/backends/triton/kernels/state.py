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

import triton
import triton.language as tl

MOST = tl.constexpr(2**31 - 1)
VARIANTS = tl.constexpr(4)  # of members that close circles
THRESHOLD, SLACK, MEASURES = (tl.constexpr(number) for number in (0, 1, 2))
PEAK, COPIES, FANOUT, EGRESS = (tl.constexpr(number) for number in range(4))
BUFFER, REACHED, MADE, TRANSFERS, AT_HOME, OUTCOMES = (tl.constexpr(n) for n in range(6))


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
def home_of(home, domain, H: tl.constexpr, G: tl.constexpr):
    return home + domain * H * G


@triton.jit
def load_domain(home, domain, H: tl.constexpr, G: tl.constexpr):
    """[H, G] tokens of the home experts of every rank; -1: there is none."""
    row = tl.arange(0, H)[:, None]
    column = tl.arange(0, G)[None, :]
    return tl.load(home + (domain * H + row) * G + column)


@triton.jit
def attempts_of(attempts, domain, held, BUFFERS: tl.constexpr):
    """All attempts at a domain."""
    return attempts + domain * BUFFERS * 2 * held


@triton.jit
def attempt_of(attempts, buffer, held):
    """One of the attempts at a domain."""
    return attempts + buffer * 2 * held


@triton.jit
def quotas_of(attempt, held):
    """The second half of an attempt."""
    return attempt + held


@triton.jit
def loads_of(attempt_loads, domain, buffer, ranks, BUFFERS: tl.constexpr):
    return attempt_loads + (domain * BUFFERS + buffer) * ranks


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
def counts_of(counts, domain, member, MEMBERS: tl.constexpr, H: tl.constexpr, G: tl.constexpr):
    return counts + (domain * MEMBERS + member) * H * G


@triton.jit
def found_quotas_of(found, spare_slots):
    """The second half of `found`, behind the spare slots of all domains."""
    return found + spare_slots


@triton.jit
def scratch_of(scratch, domain, H: tl.constexpr, G: tl.constexpr):
    return scratch + domain * scratch_size(H, G)


@triton.jit
def work_of(work, domain, H: tl.constexpr, G: tl.constexpr):
    return work + domain * work_size(H, G)


@triton.jit
def heats_of(work, H: tl.constexpr, G: tl.constexpr):
    """[G] tokens of the hottest expert at home, of every rank."""
    return work + H * G


@triton.jit
def free_of(work, H: tl.constexpr, G: tl.constexpr):
    """[G] the free slots of every rank."""
    return work + (H + 1) * G
