"""One tensor of every slot of a rank: where it begins, and where results go.

Tensors stand in two stacks: those of the home slots, then those of the spare ones.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.schedule import load_span


class SlotTensors(NamedTuple):
    """One tensor of every slot: `homes` of the home slots, `copies` of the spare ones."""

    homes: Any
    copies: Any
    num_homes: Any
    home_stride: Any
    copy_stride: Any


class Sums(NamedTuple):
    """Where to store what the home experts with copies have, like `homes`; None: there, too."""

    at: Any
    spans: Any  # first and end of the copies of every home expert


@triton.jit
def of_slot(stacks, slot):
    """Where the tensor of a slot begins."""
    spare = slot - stacks.num_homes
    home_at = stacks.homes + slot.to(tl.int64) * stacks.home_stride
    return tl.where(spare < 0, home_at, stacks.copies + spare.to(tl.int64) * stacks.copy_stride)


@triton.jit
def store_of_slot(stacks, sums, slot, at, values, mask):
    """Store numbers at places of the tensor of a slot; the two stacks may differ in type."""
    homes, copies = stacks.homes, stacks.copies
    if sums.at is None and homes.dtype == copies.dtype:
        tl.store(of_slot(stacks, slot) + at, values.to(homes.dtype.element_ty), mask=mask)
    elif slot < stacks.num_homes:
        home = slot.to(tl.int64) * stacks.home_stride
        final = True
        if sums.at is not None:
            first, end = load_span(sums.spans, slot)
            final = first == end
            if not final:
                tl.store(sums.at + home + at, values, mask=mask)
        if final:
            tl.store(homes + home + at, values.to(homes.dtype.element_ty), mask=mask)
    else:
        copy = copies + (slot - stacks.num_homes).to(tl.int64) * stacks.copy_stride
        tl.store(copy + at, values.to(copies.dtype.element_ty), mask=mask)
