"""The attempt that was chosen becomes the plan."""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.state import (
    MOST,
    attempt_of,
    found_quotas_of,
    home_of,
    quotas_of,
)


@triton.jit
def publish(
    found, planned_loads, expert_of_slot, attempts, attempt_loads, expert_of_place,
    first_slot_of_rank, domain, best, ranks, slots,
    H: tl.constexpr, G: tl.constexpr, HELD: tl.constexpr
):  # fmt: skip
    """Copies and loads of one attempt; `attempts` and `attempt_loads` are those of the domain.

    Another program of the same launch may have made it.
    """
    rank = tl.arange(0, G)
    load_G = tl.load(attempt_loads + best * ranks + rank, rank < ranks, cache_modifier=".cg")
    tl.store(planned_loads + domain * ranks + rank, load_G, mask=rank < ranks)
    expert_of_place = home_of(expert_of_place, domain, H, G)
    write_found(found, attempts, expert_of_place, domain, best, ranks * slots, HELD)
    free_slots(expert_of_slot, first_slot_of_rank, domain, ranks, slots, HELD)


@triton.jit
def write_found(found, attempts, expert_of_place, domain, best, held, HELD: tl.constexpr):
    """The experts and quotas of the best attempt, by spare slot."""
    slot = tl.arange(0, HELD)
    there = slot < held
    hosted = attempt_of(attempts, best, held)
    place = tl.load(hosted + slot, mask=there, other=-1, cache_modifier=".cg")
    quotas = quotas_of(hosted, held)
    quota = tl.load(quotas + slot, mask=there & (place >= 0), other=0, cache_modifier=".cg")
    expert = tl.load(expert_of_place + place, mask=place >= 0, other=MOST)
    tl.store(found + domain * held + slot, expert, mask=there)
    found_quotas = found_quotas_of(found, tl.num_programs(0) * held)
    tl.store(found_quotas + domain * held + slot, quota, mask=there)


@triton.jit
def free_slots(expert_of_slot, first_slot_of_rank, domain, ranks, slots, HELD: tl.constexpr):
    """No spare slot of the domain holds an expert until `split` says so."""
    slot = tl.arange(0, HELD)
    there = slot < ranks * slots
    slots = tl.maximum(slots, 1)
    end = tl.load(first_slot_of_rank + domain * ranks + slot // slots + 1, mask=there, other=0)
    tl.store(expert_of_slot + end - 1 - slot % slots, slot * 0 - 1, mask=there)
