"""What was routed, and what copies make of it: of some pieces, or found without reading the loads.

A rank serves what was routed to the experts at home there, less what their copies elsewhere serve,
and what its own copies serve. So rows that arrived and quotas tell what was routed, and the loads,
nearly all of a trace, need not be read. Whether that holds is tried on a sample of the loads.

Shapes: n records of a piece, R ranks.
"""

from __future__ import annotations

import numpy as np

from ultraep.arrays import IntArray
from ultraep.trace.read import Trace, imbalance
from ultraep.trace.schema import ENDS, KEY, Arrays, Header


def moved_rows(header: Header, arrays: Arrays) -> IntArray:
    """[n, R] rows that every rank has fewer by copies, from a piece of rank 0."""
    ends = arrays[ENDS]
    record = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
    expert, host, _ = arrays["copies"].T
    inside = (expert >= 0) & (expert < header.experts) & (host >= 0) & (host < header.ranks)
    first, quotas = record[inside] * header.ranks, arrays["quotas"][inside]
    home, cells = header.topology.home_of_expert[expert[inside]], len(ends) * header.ranks
    given = np.bincount(first + home, quotas, minlength=cells)
    taken = np.bincount(first + host[inside], quotas, minlength=cells)
    return (given - taken).astype(np.int64).reshape(len(ends), header.ranks)


def summed(header: Header, arrays: Arrays) -> Arrays:
    """What a table holds of a piece of rank 0, with the imbalance as planned."""
    routed = Trace(header, arrays).initial_rank_loads
    planned = routed - moved_rows(header, arrays)
    found = {name: arrays[name].astype(np.int64) for name in KEY}
    counts = np.diff(arrays[ENDS], prepend=0)
    return found | {"before": imbalance(routed), "after": imbalance(planned), "copies": counts}
