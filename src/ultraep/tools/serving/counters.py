"""What a server's page of counters tells of its imbalance, where balancing is on there.

The page is Prometheus text. Sums and counts only grow: a turn is the difference of two pages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress

SAMPLE = re.compile(r"(ultraep_imbalance_(?:before|after)_(?:sum|count))(?:\{.*\})? (\S+)")


def sums_of(page: str) -> dict[str, float]:
    """Sums and counts of the page, over all labels; empty if it has none.

    >>> sums_of('ultraep_imbalance_after_sum{policy="ultraep"} 2.5')
    {'ultraep_imbalance_after_sum': 2.5}
    """
    found: dict[str, float] = {}
    for name, value in SAMPLE.findall(page):
        with suppress(ValueError):
            found[name] = found.get(name, 0.0) + float(value)
    return found


def imbalance_between(
    before: Mapping[str, float], after: Mapping[str, float], which: str
) -> float | None:
    """Mean imbalance, "before" or "after" copies, between two pages; None: it was not told."""
    name = f"ultraep_imbalance_{which}"
    total, count = (
        after.get(f"{name}_{part}", 0.0) - before.get(f"{name}_{part}", 0.0)
        for part in ("sum", "count")
    )
    return total / count if count > 0 else None
