"""When a replica, and when a batch, is large enough to balance."""

from __future__ import annotations

from math import ceil

# Operations that a rank performs while one byte of an expert arrives, rounded: float32 on one core
# beside gloo on one host, and bfloat16 on a GPU beside NVLink.
OPERATIONS_PER_BYTE = {"cpu": 48.0, "cuda": 2000.0}


def rows_to_pay(nbytes: int, parameters: int, device: str) -> int:
    """Return the rows that a replica must serve to save more time than its transfer takes.

    A transfer takes `nbytes` over the link; each row saves two operations per parameter. The
    result is 96 rows for float32 on CPUs and 2000 rows for bfloat16 on GPUs.

    >>> rows_to_pay(nbytes=4_000, parameters=1_000, device="cpu")
    96
    """
    per_byte = OPERATIONS_PER_BYTE.get(device, OPERATIONS_PER_BYTE["cuda"])
    return max(1, ceil(nbytes / (2 * parameters) * per_byte))


def least_tokens(rows: int, ranks: int, top_k: int) -> int:
    """Return the tokens of all ranks for which a rank has `rows` rows on average.

    Smaller batches, mostly decoding, are not balanced.

    >>> least_tokens(rows=16, ranks=4, top_k=8)
    8
    """
    return ceil(rows * ranks / top_k)
