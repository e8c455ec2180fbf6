"""Twin of `grad_reduce`: the gradients of all copies, pulled by the home and added in fixed order.

Shapes: W numbers of a tile.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.schedule import homes_of, load_place, load_span, places_of


@triton.jit
def row_of(rows, places, copy, width, own, ALIGNED: tl.constexpr):
    """Where the gradient of a copy begins; it has the type of what the home expert has itself."""
    host, slot = load_place(places, copy)
    row = tl.load(rows + host).to(own.dtype) + slot.to(tl.int64) * width
    return tl.multiple_of(row, 16) if ALIGNED else row


@triton.jit
def add_rows(
    total, rows, places, copy, end, width, own, here, there,
    AHEAD: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """The total with the gradients of up to `AHEAD` copies, in their order."""
    first = row_of(rows, places, copy, width, own, ALIGNED)
    if AHEAD == 1:
        return total + tl.load(first + here, mask=there).to(total.dtype)
    second = row_of(rows, places, tl.minimum(copy + 1, end - 1), width, own, ALIGNED)
    third = row_of(rows, places, tl.minimum(copy + 2, end - 1), width, own, ALIGNED)
    tile_1 = tl.load(first + here, mask=there)
    tile_2 = tl.load(second + here, mask=there & (here * 0 + copy + 1 < end), other=-0.0)
    tile_3 = tl.load(third + here, mask=there & (here * 0 + copy + 2 < end), other=-0.0)
    return total + tile_1.to(total.dtype) + tile_2.to(total.dtype) + tile_3.to(total.dtype)


@triton.jit(do_not_specialize=["slots", "copies", "homes"])
def pull(
    gradients,
    own,
    rows,
    schedule,
    slots,
    copies,
    homes,
    width,
    stride,
    ACCUMULATOR: tl.constexpr,
    ZERO: tl.constexpr,
    AHEAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    W: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """For every home expert, what it has itself and what its copies hold, in the order of the plan.

    gradients, own: [H, width] of the home experts, `stride` apart; may be one tensor. Those without
    copies are left alone.   rows: addresses of every rank's `[slots, width]` gradients, of the type
    of `own`.   ZERO: leave the copies' gradients at nothing.
    ALIGNED: rows begin at multiples of 16 bytes.

    Home expert 0 has one copy, in slot 0 of rank 1:

    >>> schedule = [1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, -1, 1, 0, -2, 0, 0, 1, 0, 0]
    >>> example(pull, 1, gradients=[[-1.0, -1.0], [3.0, 4.0]], own=[[1.0, 2.0], [0.0, 0.0]],
    ...         rows=at([[0.5, 0.5]], [[10.0, 20.0]]), schedule=schedule, copies=2, homes=2,
    ...         width=2, stride=2, ACCUMULATOR=tl.float32, ZERO=True, AHEAD=1, ALIGNED=False, W=2,
    ...         PROGRAMS=1)
    gradients = [[11.0, 22.0], [3.0, 4.0]]
    rows = [[[0.5, 0.5]], [[0.0, 0.0]]]
    """
    worker = tl.program_id(0)
    places, spans = places_of(schedule, copies, slots), homes_of(schedule, copies, slots)
    at = tl.arange(0, W)
    target, source = gradients, own
    for home in range(homes):
        first, end = load_span(spans, home)
        if end > first:
            for begin in range(worker * W, width, PROGRAMS * W):
                here = begin + at
                there = here < width
                total = tl.load(source + here, mask=there).to(ACCUMULATOR)
                for copy in range(first, end, AHEAD):
                    # All are loaded before the first is added: several loads are in flight.
                    total = add_rows(
                        total, rows, places, copy, end, width, own, here, there,
                        AHEAD, ALIGNED
                    )  # fmt: skip
                tl.store(target + here, total.to(gradients.dtype.element_ty), mask=there)
                if ZERO:
                    for copy in range(first, end):
                        held = row_of(rows, places, copy, width, own, ALIGNED)
                        tl.store(held + here, 0.0, mask=there)
        target += stride
        source += stride
