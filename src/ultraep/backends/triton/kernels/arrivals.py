"""Rows that arrive, gathered in the order of the tokens that they belong to.

    list_arrivals   the arrived rows of every token of all ranks
    gather_tokens   the values of these rows, those of every token read once

What several experts of a rank want of a token crosses a link once. And all ranks come to the same
tokens at about the same time: ranks that share a cache read most of them from there.

Shapes: A arrived rows; tokens are those of all ranks, one rank after the other.
"""

import triton
import triton.language as tl

from ultraep.backends.triton.kernels.rows import own_tiles, parted, tile_at


@triton.jit(do_not_specialize=["num_local"])
def list_arrivals(
    origin_of_row,
    offsets,
    numbers,
    arrivals,
    gathered,
    num_local,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
    WORDS: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
):
    """Every program takes tiles of B arrived rows.

    numbers: [TOKENS], the tokens of all ranks: how many rows of each have arrived; 0 before.
    arrivals: [CHOICES, TOKENS] these rows, in any order.
    gathered: [A, WORDS] words of any type; rows of unknown origin become 0.

    Rows 0 and 4 belong to token 1 of the second rank, of two that have two tokens with two choices:

    >>> example(list_arrivals, 1, origin_of_row=[6, 2, -1, 4, 7, 0], offsets=[0, 1, 2, 5],
    ...         numbers=[0, 0, 0, 0], arrivals=room(2, 4), gathered=room(6, 2), num_local=3,
    ...         TOKENS=4, CHOICES=2, WORDS=2, B=8, C=2)
    numbers = [0, 1, 1, 2]
    arrivals = [[_, 1, 3, 0], [_, _, _, 4]]
    gathered = [[_, _], [_, _], [0, 0], [_, _], [_, _], [_, _]]
    """
    total = tl.load(offsets + num_local)
    for first in range(tl.program_id(0) * B, total, tl.num_programs(0) * B):
        row = first + tl.arange(0, B)
        origin = tl.load(origin_of_row + row, mask=row < total, other=-1)
        token, known = origin // CHOICES, origin >= 0
        number = tl.atomic_add(numbers + token, 1, mask=known, sem="relaxed")
        listed = known & (number < CHOICES)  # one more, only if ids are not those of the plan
        tl.store(arrivals + number.to(tl.int64) * TOKENS + token, row, mask=listed)
        lost = (row < total) & ~listed
        if tl.max(lost.to(tl.int32), 0) > 0:
            for begin in range(0, WORDS, C):
                word = begin + tl.arange(0, C)
                at = gathered + row[:, None].to(tl.int64) * WORDS + word[None, :]
                tl.store(at, 0, mask=lost[:, None] & (word < WORDS)[None, :])


@triton.jit
def gather_tokens(
    addresses,
    numbers,
    arrivals,
    gathered,
    OWN: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    CHOICES: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
):
    """Every program takes its share of the tiles of B tokens, OWN of every rank, and C words.

    What several experts of this rank want is read once, and by all ranks at about the same time: if
    they share a cache, mostly from there.
    gathered: [A, WORDS] words of any type.

    >>> first, second = [[1, 10], [2, 20]], [[3, 30], [4, 40]]
    >>> example(gather_tokens, 1, addresses=at(first, second), numbers=[0, 1, 1, 2],
    ...         arrivals=[[0, 1, 3, 0], [0, 0, 0, 4]], gathered=room(6, 2), OWN=2, TOKENS=4,
    ...         WORDS=2, CHOICES=2, B=4, C=2)
    gathered = [[4, 40], [2, 20], [_, _], [3, 30], [4, 40], [_, _]]
    """
    WORD: tl.constexpr = gathered.dtype.element_ty
    ROW_BYTES: tl.constexpr = WORDS * WORD.primitive_bitwidth // 8
    TILES: tl.constexpr = (WORDS + C - 1) // C
    begin, end = own_tiles((TOKENS + B - 1) // B * TILES)
    first = begin // TILES * B
    here = wanted_of(addresses, numbers, arrivals, first, OWN, TOKENS, CHOICES, ROW_BYTES, B)
    for tile in range(begin, end):
        word = tile % TILES * C + tl.arange(0, C)
        token = tile // TILES * B + tl.arange(0, B)
        address, number, arrival = here
        words = tile_at(address, word, WORDS, WORD)
        following = (tile + 1) // TILES * B
        here = wanted_of(
            addresses, numbers, arrivals, following, OWN, TOKENS, CHOICES, ROW_BYTES, B
        )
        for choice in range(tl.max(number, 0)):
            there = (choice < number)[:, None] & (word < WORDS)[None, :]
            at = gathered + arrival[:, None].to(tl.int64) * WORDS + word[None, :]
            tl.store(at, words, mask=there)
            more = arrivals + (choice + 1) * TOKENS + token
            arrival = tl.load(more, mask=choice + 1 < number, other=0)


@triton.jit
def wanted_of(
    addresses,
    numbers,
    arrivals,
    first,
    OWN: tl.constexpr,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    B: tl.constexpr,
):
    """[B] addresses of the values of tokens; how many arrived rows want them, and one of these."""
    token = first + tl.arange(0, B)
    number = tl.load(numbers + token, mask=token < TOKENS, other=0)
    wanted = number > 0
    arrival = tl.load(arrivals + token, mask=wanted, other=0)
    rank, own = parted(token, OWN)
    begin = tl.load(addresses + rank, mask=wanted, other=0)
    address = begin + own.to(tl.int64) * ROW_BYTES
    return tl.where(wanted, address, 0), tl.minimum(number, CHOICES), arrival
