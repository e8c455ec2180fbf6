"""From how many tokens on a batch is balanced: a copy must serve enough rows to pay for its way.

Sending an expert takes its bytes over the speed of the link; a row that another rank computes
saves two operations for each parameter. So a copy pays from

    rows = bytes / (2 * parameters) * (operations in the time of one byte)

on, which is 16 rows of float32 on CPUs of one host, and 2000 of bfloat16 on GPUs with a fast link.
A batch with fewer rows on a rank, on average, cannot win: decoding, mostly. It is left alone.
"""

from __future__ import annotations

from math import ceil

# Operations that a rank does while a byte of an expert arrives, in round figures: products of a
# core beside messages through memory of one host, and products of bfloat16 beside NVLink.
OPERATIONS_PER_BYTE = {"cpu": 8.0, "cuda": 2000.0}


def rows_to_pay(nbytes: int, parameters: int, device: str) -> int:
    """Rows that a copy must serve, for an expert of so many bytes and parameters.

    >>> rows_to_pay(nbytes=4_000, parameters=1_000, device="cpu")
    16
    """
    per_byte = OPERATIONS_PER_BYTE.get(device, OPERATIONS_PER_BYTE["cuda"])
    return max(1, ceil(nbytes / (2 * parameters) * per_byte))


def least_tokens(rows: int, ranks: int, top_k: int) -> int:
    """Tokens of all ranks from which on a rank has so many rows, on average.

    >>> least_tokens(rows=16, ranks=4, top_k=8)
    8
    """
    return ceil(rows * ranks / top_k)
