"""Sizes, counts and tables as text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

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


def table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> str:
    """Return an HTML table; the first column names the rows."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    cells = [[f"<td>{escape(cell)}</td>" for cell in row[1:]] for row in rows]
    lines = zip((escape(row[0]) for row in rows), map("".join, cells), strict=True)
    body = "\n".join(f"<tr><th>{first}</th>{rest}</tr>" for first, rest in lines)
    return f'<table id="{name}"><thead><tr>{titles}</tr></thead><tbody>\n{body}\n</tbody></table>'
