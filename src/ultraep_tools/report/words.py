"""Sizes and counts as text."""

from __future__ import annotations

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size(count: float) -> str:
    """Return bytes with a unit.

    >>> size(0), size(2048), size(3.2e9)
    ('0 B', '2.05 kB', '3.2 GB')
    """
    for factor, unit in UNITS:
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "rank"), counted(2000, "microbatch")
    ('1 rank', '2,000 microbatches')
    """
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"
