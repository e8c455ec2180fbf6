"""Twin of the search in `reference/place.py`: the least threshold that alias planning meets."""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.attempts import alias
from ultraep.backends.triton.kernels.bound import bound
from ultraep.backends.triton.kernels.state import attempt_of, home_of, load_domain, scratch_of
from ultraep.backends.triton.kernels.thresholds import rank_loads_of

GUESSES = tl.constexpr(4)


@triton.jit
def excess_share(load_G, threshold):
    """What is too much, shared among the ranks that are full, rounded up."""
    full_G = load_G >= threshold
    over = tl.sum(tl.where(full_G, load_G - threshold, 0).to(tl.int64), 0)
    full = tl.maximum(tl.sum(full_G.to(tl.int32), 0), 1)
    return (over + full - 1) // full


@triton.jit
def least_that_is_met(
    home, attempts, attempt_loads, scratch, domain, best, peak, alias_peak, threshold,
    ranks, slots, min_tokens, limit,
    H: tl.constexpr, G: tl.constexpr, HELD: tl.constexpr, ONE_SLOT: tl.constexpr,
    BUFFERS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """The buffer of the best attempt above the threshold; all are those of the domain.

    alias_peak: of the first attempt at the threshold, in buffer 0.
    """
    SPARE: tl.constexpr = BUFFERS - 3  # the first of two buffers to try again
    home_HG = load_domain(home, domain, H, G)
    load_G = rank_loads_of(home_HG)
    rank, held = tl.arange(0, G), ranks * slots
    scratch = scratch_of(scratch, domain, H, G)
    least = bound(load_G, home_of(home, domain, H, G), scratch, ranks, slots, limit, H, G, STEP)
    tl.debug_barrier()
    end_G = tl.load(attempt_loads + rank, mask=rank < ranks, other=0)
    failed = tl.maximum(threshold, least - 1)
    last = threshold
    above_last = alias_peak - threshold
    middle = tl.maximum(failed + 1, threshold + excess_share(end_G, threshold))
    met = 0
    tries = 0
    while peak - failed > 1:
        now = tl.minimum(middle, peak - 1).to(tl.int32)
        trial = tl.where(best == SPARE, SPARE + 1, SPARE)
        end_G, _home_HG, _made, _received = alias(
            load_G, home_HG, attempt_of(attempts, trial, held), now, tl.zeros((), tl.int64),
            ranks, slots, slots, min_tokens, limit, H, G, HELD, ONE_SLOT, False, False
        )  # fmt: skip
        trial_peak = tl.max(end_G, 0)
        tries += 1
        if trial_peak < peak:
            tl.store(attempt_loads + trial * ranks + rank, end_G, mask=rank < ranks)
            best = trial
            peak = trial_peak
        above = trial_peak - now
        is_met = above <= 0
        met += is_met.to(tl.int32)
        gain = above_last - above
        steps = tl.maximum(above, 0).to(tl.int64) * (now - last) + gain - 1
        step = tl.where(gain > 0, steps // tl.maximum(gain, 1), excess_share(end_G, now))
        failed = tl.where(is_met, failed, now)
        above_last = tl.where(is_met, above_last, above)
        last = tl.where(is_met, last, now)
        half = (failed + (peak - failed) // 2).to(tl.int64)
        below = tl.where(met == 1, (peak - 1).to(tl.int64), half)
        guess = tl.where((met == 0) & (tries < GUESSES), now + tl.maximum(step, 1), half)
        middle = tl.where(is_met, below, guess)
    return best
