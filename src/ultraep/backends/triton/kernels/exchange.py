"""Rows between GPUs that access each other's memory: every rank reads what it needs.

    make_tables     where slots begin in the sending order, and ranks among the arrivals
    expose_routes   publish order and scalars of the routed rows
    expose_values   publish tokens, or gradients of outputs
    origins         source rank and row of every arrived row, and its scalar
    gather_rows     values of the arrived rows
    landings        rank and arrived row that serve every routed row
    sum_rows        served rows of every token, added in the order of its choices

`addresses` holds the address of a region on every rank, a multiple of 16. A region holds

    tables   `blocks` [R, stride], where the rows of every rank begin among the arrivals of each
             slot; where each slot begins in the sending order; the sending order; scalars of the
             routed rows
    values   [tokens, width]
    served   rows [A, width]; their scalars are in another region

A row of a rank is one integer: rank * RANK + row. The caller must synchronise the ranks between
kernels that write a region and kernels that read it.

Data from other ranks is not trusted with an address: positions and rows are compared with the
agreed sizes.

Shapes: T tokens, K choices, N = T * K routed rows, S slots of all ranks, L slots of this rank, R
ranks, A arrived rows.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.plan import received_at

LARGEST = tl.constexpr(2**31 - 1)
RANK = tl.constexpr(2**32)


@triton.jit
def part_of(addresses, rank, at, TYPE: tl.constexpr):
    """Return the pointer to byte `at`, a multiple of 16, of the regions of these ranks."""
    begin = tl.load(addresses + rank) + at
    return tl.multiple_of(begin, 16).to(tl.pointer_type(TYPE))


@triton.jit
def own_tiles(tiles):
    """Return the tiles of this program: neighbours, so that it loads most addresses once."""
    share = tl.cdiv(tiles, tl.num_programs(0))
    begin = tl.program_id(0) * share
    return begin, tl.minimum(begin + share, tiles)


@triton.jit
def values_of(
    addresses, origin_of_row, first, total, CHOICES: tl.constexpr, ROW_BYTES: tl.constexpr,
    B: tl.constexpr
):  # fmt: skip
    """[B] addresses of the values of the arrived rows, from row `first` on; 0: unknown origin."""
    row = first + tl.arange(0, B)
    origin = tl.load(origin_of_row + row, mask=row < total, other=-1)
    known = origin >= 0
    rank, routed = origin // RANK, origin % RANK
    begin = tl.load(addresses + rank, mask=known, other=0)
    return tl.where(known, begin + routed // CHOICES * ROW_BYTES, 0)


@triton.jit
def tile_at(row_addresses, column, WIDTH: tl.constexpr, TYPE: tl.constexpr):
    """[B, C] some columns of the rows at these addresses; 0 without a row or column."""
    # The hint enables loads of 16 bytes; rows of other lengths are not aligned.
    ALIGNED: tl.constexpr = 16 if WIDTH * TYPE.primitive_bitwidth % 128 == 0 else 1
    begin = tl.multiple_of(row_addresses.to(tl.pointer_type(TYPE))[:, None], [1, ALIGNED])
    there = (row_addresses != 0)[:, None] & (column < WIDTH)[None, :]
    return tl.load(begin + column[None, :], mask=there, other=0)


@triton.jit
def served_of(
    addresses, landing_of_row, first, tokens, CHOICES: tl.constexpr, ROW_BYTES: tl.constexpr,
    B: tl.constexpr
):  # fmt: skip
    """For every choice, the addresses [B] of the rows served for these tokens; 0: none."""
    token = first + tl.arange(0, B)
    pointers = ()
    for choice in tl.static_range(CHOICES):
        row = token.to(tl.int64) * CHOICES + choice
        landing = tl.load(landing_of_row + row, mask=token < tokens, other=-1)
        rank, arrived = landing // RANK, landing % RANK
        begin = tl.load(addresses + rank, mask=landing >= 0, other=0)
        served = begin + arrived * ROW_BYTES
        pointers = pointers + (tl.where(landing >= 0, served, 0),)  # noqa: RUF005
    return pointers


@triton.jit
def pull_scalars(addresses, landing_of_row, scalars, num_rows):
    """[N] the scalars of the served rows; 0: not served."""
    B: tl.constexpr = 512
    for first in range(tl.program_id(0) * B, num_rows, tl.num_programs(0) * B):
        row = first + tl.arange(0, B)
        landing = tl.load(landing_of_row + row, mask=row < num_rows, other=-1)
        known = tl.maximum(landing, 0)
        rank, arrived = known // RANK, known % RANK
        there = part_of(addresses, rank, 0, scalars.dtype.element_ty)
        scalar = tl.load(there + arrived, mask=landing >= 0, other=0.0)
        tl.store(scalars + row, scalar, mask=row < num_rows)


@triton.jit(do_not_specialize=["num_slots", "num_local", "ranks", "rows", "capacity", "stride"])
def make_tables(
    rows_of_slot,
    received,
    rank_loads,
    fault,
    begins,
    blocks,
    offsets,
    faults,
    num_slots,
    num_local,
    ranks,
    rows,
    capacity,
    stride,
    B: tl.constexpr,
):
    """Write the tables of what this rank sends (program 0) and of what arrives (program 1).

    rank_loads: [R] rows that every rank serves.   fault: the first word of the signals.
    begins: [S] where the rows of every slot begin in the sending order.
    blocks: [R, stride] where the rows of every rank begin among the arrivals of each slot.
    offsets: [L + 2] where the arrivals of each slot begin, their number, and whether results are
        wrong: after a fault, or if a rank serves more rows than `capacity`.
    faults: how often more than `capacity` rows arrived, and the most that ever arrived.

    >>> example(make_tables, 2, rows_of_slot=[1, 0, 0, 1, 0, 3], received=[[0, 1, 0], [1, 0, 3]],
    ...         rank_loads=[4, 5], fault=[0], begins=empty(6), blocks=empty(2, 3),
    ...         offsets=empty(5), faults=[0, 0], num_local=3, rows=5, capacity=8, stride=3, B=8)
    begins = [0, 1, 1, 1, 2, 2]
    blocks = [[0, 1, 2], [0, 2, 2]]
    offsets = [0, 1, 2, 5, 0]
    faults = [0, 5]
    """
    end = tl.zeros([], tl.int64)
    if tl.program_id(0) == 0:
        for first in range(0, num_slots, B):
            slot = first + tl.arange(0, B)
            rows_B = tl.load(rows_of_slot + slot, mask=slot < num_slots, other=0).to(tl.int64)
            rows_B = tl.maximum(rows_B, 0)
            begin_B = end + tl.cumsum(rows_B, 0) - rows_B
            tl.store(begins + slot, tl.minimum(begin_B, rows).to(tl.int32), mask=slot < num_slots)
            end += tl.sum(rows_B, 0)
        wrong = tl.load(fault)
        for rank in range(ranks):
            wrong = tl.where(tl.load(rank_loads + rank) > capacity, 1, wrong)
        tl.store(offsets + num_local + 1, wrong)
    else:
        for first in range(0, num_local * ranks, B):
            block = first + tl.arange(0, B)
            local, source = block // ranks, block % ranks
            there = local < num_local
            rows_B = tl.load(received_at(received, source, local, num_local), mask=there, other=0)
            rows_B = tl.maximum(rows_B.to(tl.int64), 0)
            begin_B = end + tl.cumsum(rows_B, 0) - rows_B
            begin_B = tl.minimum(begin_B, capacity).to(tl.int32)
            tl.store(blocks + source * stride + local, begin_B, mask=there)
            tl.store(offsets + local, begin_B, mask=there & (source == 0))
            end += tl.sum(rows_B, 0)
        tl.store(offsets + num_local, tl.minimum(end, capacity).to(tl.int32))
        too_many = end > capacity
        tl.atomic_add(faults, 1, mask=too_many, sem="relaxed")
        most = tl.minimum(end, LARGEST).to(tl.int32)
        tl.atomic_max(faults + 1, most, sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def expose_routes(order, scalars, exposed_order, exposed_scalars, rows, B: tl.constexpr):
    """Copy order and scalars of the routed rows to the tables, in the dtype of the tables."""
    for first in range(tl.program_id(0) * B, rows, tl.num_programs(0) * B):
        row = first + tl.arange(0, B)
        there = row < rows
        tl.store(exposed_order + row, tl.load(order + row, mask=there), mask=there)
        scalar = tl.load(scalars + row, mask=there).to(exposed_scalars.dtype.element_ty)
        tl.store(exposed_scalars + row, scalar, mask=there)


@triton.jit(do_not_specialize=["num_bytes"])
def expose_values(
    values, exposed, num_bytes, WORD: tl.constexpr, LANES: tl.constexpr, B: tl.constexpr
):
    """Copy bytes, 16 at a time, as words of a dtype that suits the alignment of the values.

    LANES: words per 16 bytes.   B: words that a program copies at once.
    """
    source, target = values.to(tl.pointer_type(WORD)), exposed.to(tl.pointer_type(WORD))
    tiles = tl.cdiv(num_bytes // 16, B // LANES)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        word = tile * B + tl.arange(0, B).to(tl.int64)
        # The mask is uniform over 16 bytes: otherwise every word would be a separate load.
        there = word // LANES < num_bytes // 16
        tl.store(target + word, tl.load(source + word, mask=there), mask=there)
    if tl.program_id(0) == 0:
        byte = num_bytes // 16 * 16 + tl.arange(0, 16)
        left, first = byte < num_bytes, values.to(tl.pointer_type(tl.uint8))
        tl.store(exposed + byte, tl.load(first + byte, mask=left), mask=left)


@triton.jit(do_not_specialize=["rank", "num_local", "capacity", "rows", "stride", "scalars_at"])
def origins(
    addresses,
    received,
    blocks,
    first_slot_of_rank,
    origin_of_row,
    gate_of_row,
    rank,
    num_local,
    capacity,
    rows,
    stride,
    scalars_at,
    BEGINS: tl.constexpr,
    ORDER: tl.constexpr,
    B: tl.constexpr,
):
    """Program (l, q, p): part p of the arrivals of slot l from rank q.

    origin_of_row: [A] rank * RANK + routed row; -1: unknown.   gate_of_row: [A] its scalar.
    scalars_at: the byte at which the scalars of the routed rows begin.

    >>> scalars = [0.5, 0.25, 0.125, 1.0, 2.0]
    >>> first = parts([0, 2, 3, 3, 3, 4], [0, 3, 1, 2, -1], scalars)  # begins, order, scalars
    >>> second = parts([0, 1, 1, 1, 2, 2], [0, 1, 4, 3, 2], scalars)
    >>> example(origins, (3, 2, 1), addresses=at(first, second), received=[[0, 1, 0], [1, 0, 3]],
    ...         blocks=[[0, 1, 2], [0, 2, 2]], origin_of_row=empty(8, dtype=torch.int64),
    ...         gate_of_row=empty(8, dtype=torch.float32), rank=1, num_local=3, capacity=8, rows=5,
    ...         stride=3, scalars_at=64, BEGINS=0, ORDER=32, B=4)
    origin_of_row = [4294967297, 2, 4294967300, 4294967299, 4294967298, _, _, _]
    gate_of_row = [0.25, 0.125, 2.0, 1.0, 0.125, _, _, _]
    """
    local, source, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    order = part_of(addresses, source, ORDER, tl.int32)
    begins = part_of(addresses, source, BEGINS, tl.int32)
    scalars = part_of(addresses, source, scalars_at, gate_of_row.dtype.element_ty)
    begin = tl.load(begins + tl.load(first_slot_of_rank + rank) + local)
    begin = tl.minimum(tl.maximum(begin, 0), rows)
    target = tl.load(blocks + source * stride + local)
    number = tl.load(received_at(received, source, local, num_local))
    number = tl.minimum(number, capacity - target)
    for first in range(part * B, number, tl.num_programs(2) * B):
        row = first + tl.arange(0, B)
        there = row < number
        sent = tl.load(order + begin + row, mask=there & (row < rows - begin), other=-1)
        known = (sent >= 0) & (sent < rows)
        weight = tl.load(scalars + sent, mask=known, other=0.0)
        origin = tl.where(known, source.to(tl.int64) * RANK + sent, -1)
        tl.store(origin_of_row + target + row, origin, mask=there)
        tl.store(gate_of_row + target + row, weight, mask=there)


@triton.jit(do_not_specialize=["num_local"])
def gather_rows(
    addresses,
    origin_of_row,
    offsets,
    gathered,
    num_local,
    CHOICES: tl.constexpr,
    WORD: tl.constexpr,
    WORDS: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
):
    """Copy the values of the arrived rows, in tiles of B rows and C words.

    Addresses of the next tile are loaded while the words of this one are in flight.
    gathered: [A, WORDS] words of the dtype WORD; rows of unknown origin become 0.

    >>> first = [[1, 10], [2, 20], [3, 30], [4, 40], [5, 50]]
    >>> second = [[6, 60], [7, 70], [8, 80], [9, 90], [0, 0]]
    >>> example(gather_rows, 1, addresses=at(first, second),
    ...         origin_of_row=torch.tensor([2**32 + 1, 2, 2**32 + 4, 2**32 + 3, 2**32 + 2, 0]),
    ...         offsets=[0, 1, 2, 5], gathered=empty(8, 2), num_local=3, CHOICES=1, WORD=tl.int32,
    ...         WORDS=2, B=4)
    gathered = [[7, 70], [3, 30], [0, 0], [9, 90], [8, 80], [_, _], [_, _], [_, _]]
    """
    gathered = gathered.to(tl.pointer_type(WORD))
    ROW_BYTES: tl.constexpr = WORDS * WORD.primitive_bitwidth // 8
    TILES: tl.constexpr = (WORDS + C - 1) // C
    total = tl.load(offsets + num_local)
    begin, end = own_tiles(tl.cdiv(total, B) * TILES)
    first = begin // TILES * B
    here = values_of(addresses, origin_of_row, first, total, CHOICES, ROW_BYTES, B)
    for tile in range(begin, end):
        row = tile // TILES * B + tl.arange(0, B)
        word = tile % TILES * C + tl.arange(0, C)
        words = tile_at(here, word, WORDS, WORD)
        following = (tile + 1) // TILES * B
        here = values_of(addresses, origin_of_row, following, total, CHOICES, ROW_BYTES, B)
        there = (row < total)[:, None] & (word < WORDS)[None, :]
        tl.store(gathered + row[:, None].to(tl.int64) * WORDS + word[None, :], words, mask=there)


@triton.jit(do_not_specialize=["rank", "num_slots", "num_rows", "capacity", "stride"])
def landings(
    addresses,
    slots,
    positions,
    begins,
    rank_of_slot,
    first_slot_of_rank,
    landing_of_row,
    rank,
    num_slots,
    num_rows,
    capacity,
    stride,
    BLOCKS: tl.constexpr,
    B: tl.constexpr,
):
    """Program t: the routed rows of tile t.

    landing_of_row: [N] rank * RANK + arrived row; -1: not sent, or above the capacity.

    >>> first, second = [[0, 3, 4], [2, 4, 4]], [[0, 1, 2], [0, 2, 2]]  # the blocks of both ranks
    >>> example(landings, 1, addresses=at(first, second), slots=[0, 3, 5, 5, 5],
    ...         positions=[0, 1, 4, 3, 2], begins=[0, 1, 1, 1, 2, 2],
    ...         rank_of_slot=[0, 0, 0, 1, 1, 1], landing_of_row=empty(5, dtype=torch.int64),
    ...         rank=1, num_rows=5, capacity=8, stride=3, BLOCKS=0, B=8)
    landing_of_row = [2, 4294967296, 4294967300, 4294967299, 4294967298]
    """
    row = tl.program_id(0) * B + tl.arange(0, B)
    there = row < num_rows
    slot = tl.load(slots + row, mask=there, other=-1).to(tl.int32)
    known = (slot >= 0) & (slot < num_slots)
    target = tl.load(rank_of_slot + slot, mask=known, other=0)
    local = slot - tl.load(first_slot_of_rank + target, mask=known, other=0)
    blocks = part_of(addresses, target, BLOCKS, tl.int32)
    begin = tl.load(blocks + rank * stride + local, mask=known, other=0)
    within = tl.load(positions + row, mask=known, other=0)
    within -= tl.load(begins + slot, mask=known, other=0)
    held = known & (begin >= 0) & (within >= 0) & (within < capacity - begin)
    landing = target.to(tl.int64) * RANK + (begin + within)
    tl.store(landing_of_row + row, tl.where(held, landing, -1), mask=there)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["wrong"])
def sum_rows(
    addresses,
    scalar_addresses,
    landing_of_row,
    summed,
    scalars,
    wrong,
    tokens,
    CHOICES: tl.constexpr,
    WIDTH: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
):
    """Sum the served rows of every token, in tiles of B tokens and C columns.

    The rows of all choices are in flight at once, and so are the addresses of the next tile.
    summed: [T, WIDTH] rounded once.   scalars: [T, K]; None: not needed.
    wrong: whether rows are missing; then all sums are NaN.

    >>> first, second = [[1.0, 10.0], [2.0, 20.0]], [[3.0, 30.0], [4.0, 40.0]]
    >>> example(sum_rows, 1, addresses=at(first, second), wrong=[0],
    ...         scalar_addresses=at([0.75, 0.125], [0.5, 0.25]),
    ...         landing_of_row=torch.tensor([1, 2**32, 2**32 + 1, -1]),
    ...         summed=empty(2, 2, dtype=torch.float32), scalars=empty(2, 2, dtype=torch.float32),
    ...         tokens=2, CHOICES=2, WIDTH=2, B=2)
    summed = [[5.0, 50.0], [4.0, 40.0]]
    scalars = [[0.125, 0.5], [0.25, 0.0]]
    """
    TYPE: tl.constexpr = summed.dtype.element_ty
    SUM: tl.constexpr = tl.float64 if TYPE.primitive_bitwidth == 64 else tl.float32
    ROW_BYTES: tl.constexpr = WIDTH * TYPE.primitive_bitwidth // 8
    TILES: tl.constexpr = (WIDTH + C - 1) // C
    if scalars is not None:
        pull_scalars(scalar_addresses, landing_of_row, scalars, tokens * CHOICES)
    poison = tl.where(tl.load(wrong) != 0, float("nan"), 0.0)
    begin, end = own_tiles(tl.cdiv(tokens, B) * TILES)
    first = begin // TILES * B
    here = served_of(addresses, landing_of_row, first, tokens, CHOICES, ROW_BYTES, B)
    for tile in range(begin, end):
        token = tile // TILES * B + tl.arange(0, B)
        column = tile % TILES * C + tl.arange(0, C)
        served = ()
        for choice in tl.static_range(CHOICES):
            served = served + (tile_at(here[choice], column, WIDTH, TYPE),)  # noqa: RUF005
        following = (tile + 1) // TILES * B
        here = served_of(addresses, landing_of_row, following, tokens, CHOICES, ROW_BYTES, B)
        total = tl.zeros([B, C], SUM) + poison
        for choice in tl.static_range(CHOICES):
            total += served[choice].to(SUM)
        there = (token < tokens)[:, None] & (column < WIDTH)[None, :]
        target = summed + token[:, None].to(tl.int64) * WIDTH + column[None, :]
        tl.store(target, total.to(TYPE), mask=there)
