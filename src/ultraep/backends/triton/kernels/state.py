"""Layouts of what the planner notes while it plans, of every domain.

    home            [D, H, G]   tokens of the home experts (rows) of its ranks (columns); -1: none
    attempts        [D, BUFFERS, 2, held]   of every spare slot: the place of its expert in `home`
                    (row * G + column; -1: the slot stays free), then all quotas
    attempt_loads   [D, BUFFERS, ranks]   tokens that every rank serves by each attempt
    facts           [D, FACTS]   the threshold, whether it is above the mean, then the peaks and the
                    numbers of copies of the two first attempts
    found           [2, D * held]   the best: the expert of every spare slot (`MOST`: none), quotas
    scratch         [D, scratch_size]   for `bound`
    work            [D, H + 2, G]   for `groups`: tokens at home, the hottest of them, free slots

`held` are the spare slots of a domain, `ranks` its ranks, H and G their homes and number, padded.
"""

import triton
import triton.language as tl

MOST = tl.constexpr(2**31 - 1)
BUFFERS = tl.constexpr(3)  # of attempts: the best one, and two to try again
THRESHOLD, SLACK, PEAKS, COPIES = (tl.constexpr(number) for number in (0, 1, 2, 4))
FACTS = tl.constexpr(6)


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
def attempt_of(attempts, domain, buffer, held):
    return attempts + (domain * BUFFERS + buffer) * 2 * held


@triton.jit
def quotas_of(attempt, held):
    """The second half of an attempt."""
    return attempt + held


@triton.jit
def loads_of(attempt_loads, domain, buffer, ranks):
    return attempt_loads + (domain * BUFFERS + buffer) * ranks


@triton.jit
def fact_of(facts, domain, name, member):
    """One of the facts; peaks and copies are those of a member."""
    return facts + domain * FACTS + name + member


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
