"""Layouts of what the planner notes while it plans, of every domain.

Every rung of the ladder of tolerances is planned beside the others, by all members of the
portfolio; without the objective "time" there is one rung. RUNGS and MEMBERS are constants.

    home            [D, H, G]   tokens of the home experts (rows) of its ranks (columns); -1: none
    ladder          [RUNGS]   tolerances, in millionths
    attempts        [D, buffers, 2, held]   of every spare slot: the place of its expert in `home`
                    (row * G + column; -1: the slot stays free), then all quotas
    attempt_loads   [D, buffers, ranks]   tokens that every rank serves by each attempt
    facts           [D, RUNGS, facts_size]   the threshold, whether it is above the mean, then the
                    measures of the attempt of every member: peak, copies, fan-out, egress, ingress
    outcomes        [D, RUNGS, OUTCOMES]   the buffer of the best attempt, its measures, and the
                    peak with all tokens at home
    counts          [D, RUNGS, MEMBERS, H * G]   for `weigh`: copies of every expert
    found           [2, D * held]   the best: the expert of every spare slot (`MOST`: none), quotas
    scratch         [D, scratch_size]   for `bound`
    work            [D, RUNGS, H + 2, G]   for `groups`: tokens at home, the hottest, free slots

`held` are the spare slots of a domain, `ranks` its ranks, H and G their homes and number, padded.
Buffers: one of every member of every rung, two to try again, and one without copies.
"""

import triton
import triton.language as tl

MOST = tl.constexpr(2**31 - 1)
VARIANTS = tl.constexpr(4)  # of members that close circles
THRESHOLD, SLACK, MEASURES = (tl.constexpr(number) for number in (0, 1, 2))
PEAK, COPIES, FANOUT, EGRESS, INGRESS = (tl.constexpr(number) for number in range(5))
BUFFER, MEASURED, AT_HOME, OUTCOMES = (tl.constexpr(number) for number in (0, 1, 6, 7))


@triton.constexpr_function
def buffers_of(RUNGS, MEMBERS):
    return RUNGS * MEMBERS + 3


@triton.constexpr_function
def facts_size(MEMBERS):
    return 2 + 5 * MEMBERS


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
def attempts_of(attempts, domain, held, RUNGS: tl.constexpr, MEMBERS: tl.constexpr):
    """All attempts at a domain."""
    return attempts + domain * buffers_of(RUNGS, MEMBERS) * 2 * held


@triton.jit
def attempt_of(attempts, buffer, held):
    """One of the attempts at a domain."""
    return attempts + buffer * 2 * held


@triton.jit
def quotas_of(attempt, held):
    """The second half of an attempt."""
    return attempt + held


@triton.jit
def loads_of(attempt_loads, domain, buffer, ranks, RUNGS: tl.constexpr, MEMBERS: tl.constexpr):
    return attempt_loads + (domain * buffers_of(RUNGS, MEMBERS) + buffer) * ranks


@triton.jit
def fact_of(facts, domain, rung, name, RUNGS: tl.constexpr, MEMBERS: tl.constexpr):
    """One of the facts."""
    return facts + (domain * RUNGS + rung) * facts_size(MEMBERS) + name


@triton.jit
def measure_of(facts, domain, rung, member, name, RUNGS: tl.constexpr, MEMBERS: tl.constexpr):
    """One of the measures of a member's attempt."""
    return fact_of(facts, domain, rung, MEASURES + 5 * member + name, RUNGS, MEMBERS)


@triton.jit
def outcome_of(outcomes, domain, rung, name, RUNGS: tl.constexpr):
    return outcomes + (domain * RUNGS + rung) * OUTCOMES + name


@triton.jit
def counts_of(
    counts, domain, rung, member,
    RUNGS: tl.constexpr, MEMBERS: tl.constexpr, H: tl.constexpr, G: tl.constexpr
):  # fmt: skip
    return counts + ((domain * RUNGS + rung) * MEMBERS + member) * H * G


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
