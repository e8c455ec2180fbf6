"""A ring of plans that stays on the device: so the replays of a graph leave something behind.

Layout of `state`: how many plans were kept so far, and the step that the next ones belong to. A
place of the ring: whose plan it is, its step, its loads, then its result in one piece.
"""

import triton
import triton.language as tl

KEPT, STEP = tl.constexpr(0), tl.constexpr(1)
HEADER = tl.constexpr(2)  # numbers before the loads


@triton.jit
def copy_numbers(source, target, count, B: tl.constexpr):
    for begin in range(0, count, B):
        at = begin + tl.arange(0, B)
        there = at < count
        tl.store(target + at, tl.load(source + at, mask=there, other=0).to(tl.int32), mask=there)


@triton.jit(do_not_specialize=["site"])
def keep_plan(
    ring, state, loads, result, site, places, size, num_loads, num_results, B: tl.constexpr
):
    """Keep the plan of one microbatch in the next place, over the oldest. One program.

    >>> example(keep_plan, 1, ring=room(2, 6), state=[3, 7], loads=[[5, 1]], result=[8, 9], site=4,
    ...         places=2, size=6, num_loads=2, num_results=2, B=2)
    ring = [[_, _, _, _, _, _], [4, 7, 5, 1, 8, 9]]
    state = [4, 7]
    """
    kept = tl.load(state + KEPT)
    at = ring + (kept % places).to(tl.int64) * size
    tl.store(at, site)
    tl.store(at + 1, tl.load(state + STEP))
    copy_numbers(loads, at + HEADER, num_loads, B)
    copy_numbers(result, at + HEADER + num_loads, num_results, B)
    tl.debug_barrier()
    tl.store(state + KEPT, kept + 1)
