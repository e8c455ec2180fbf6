"""Twin of `quickest` in `reference/place.py`: the rung whose plan takes the least time."""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.publish import publish
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
    attempts_of,
    loads_of,
    outcome_of,
)

MOST_TIME = tl.constexpr(2**63 - 1)


@triton.jit(do_not_specialize=["domains", "ranks", "slots"])
def quickest(
    outcomes,
    rates,
    expert_of_place,
    first_slot_of_rank,
    attempts,
    attempt_loads,
    found,
    planned_loads,
    expert_of_slot,
    domains,
    ranks,
    slots,
    H: tl.constexpr,
    G: tl.constexpr,
    HELD: tl.constexpr,
    RUNGS: tl.constexpr,
    MEMBERS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Program d: domain d, as the rung is planned that is quickest for all domains.

    rates: row, copy, each and layer, as 64 bits; a row of 0 leaves it at the lowest rung.
    PADDED: the rungs, padded to a power of two.

    Three tokens less on the fullest rank are worth 300; a copy costs 500:

    >>> example(quickest, 1, outcomes=[[[0, 5, 1, 1, 1, 1, 8]]],
    ...         rates=torch.tensor([100, 500, 0, 0]), expert_of_place=[0, 2, 1, 3],
    ...         first_slot_of_rank=[0, 3, 6], attempts=[[[-1, 0], [0, 3]], [[0, 0], [0, 0]],
    ...         [[0, 0], [0, 0]], [[-1, -1], [0, 0]]], attempt_loads=[[5, 4], [0, 0], [0, 0],
    ...         [8, 1]], found=room(2, 2), planned_loads=room(2),
    ...         expert_of_slot=[0, 1, 0, 2, 3, 0], domains=1, ranks=2, slots=1,
    ...         H=2, G=2, HELD=2, RUNGS=1, MEMBERS=1, PADDED=1)
    found = [[2147483647, 2147483647], [0, 0]]
    planned_loads = [8, 1]
    expert_of_slot = [0, 1, -1, 2, 3, -1]
    """
    domain = tl.program_id(0)
    rung = tl.arange(0, PADDED)
    known = rung < RUNGS
    peak_R = tl.zeros((PADDED,), tl.int64)
    copies_R = tl.zeros((PADDED,), tl.int64)
    fanout_R = tl.zeros((PADDED,), tl.int32)
    links_R = tl.zeros((PADDED,), tl.int32)
    home_R = tl.zeros((PADDED,), tl.int64)
    for other in range(domains):
        at = outcome_of(outcomes, other, rung, MEASURED, RUNGS)
        peak_R = tl.maximum(peak_R, tl.load(at + PEAK, mask=known, other=0))
        copies_R += tl.load(at + COPIES, mask=known, other=0)
        fanout_R = tl.maximum(fanout_R, tl.load(at + FANOUT, mask=known, other=0))
        links_R = tl.maximum(links_R, tl.load(at + EGRESS, mask=known, other=0))
        links_R = tl.maximum(links_R, tl.load(at + INGRESS, mask=known, other=0))
        at_home = outcome_of(outcomes, other, rung, AT_HOME, RUNGS)
        home_R = tl.maximum(home_R, tl.load(at_home, mask=known, other=0))
    row = tl.load(rates)
    time_R = row * peak_R + tl.load(rates + 1) * links_R + tl.load(rates + 2) * copies_R
    time_R += tl.where(copies_R > 0, tl.load(rates + 3), 0)
    left_R = known
    time = tl.min(tl.where(left_R, time_R, MOST_TIME), 0)
    left_R = left_R & (time_R == time)
    left_R = left_R & (copies_R == tl.min(tl.where(left_R, copies_R, MOST), 0))
    left_R = left_R & (fanout_R == tl.min(tl.where(left_R, fanout_R, MOST), 0))
    chosen = tl.min(tl.where(left_R, rung, PADDED), 0)
    chosen = tl.where(row > 0, chosen, 0)
    best = tl.load(outcome_of(outcomes, domain, chosen, BUFFER, RUNGS))
    without = (row > 0) & (row * tl.max(home_R, 0) <= time)
    best = tl.where(without, RUNGS * MEMBERS + 2, best)
    attempts = attempts_of(attempts, domain, ranks * slots, RUNGS, MEMBERS)
    attempt_loads = loads_of(attempt_loads, domain, 0, ranks, RUNGS, MEMBERS)
    publish(
        found, planned_loads, expert_of_slot, attempts, attempt_loads, expert_of_place,
        first_slot_of_rank, domain, best, ranks, slots, H, G, HELD
    )  # fmt: skip
