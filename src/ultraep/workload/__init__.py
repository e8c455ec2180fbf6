"""Loads of microbatches: named and seeded generators, recorded routing, and files.

A load matrix is `[source rank, expert]`. `Load` is one of the named loads that all benchmarks use:

>>> Load("1 hot").draw(ranks=2, experts=4, tokens=3, top_k=1)
array([[3, 0, 0, 0],
       [3, 0, 0, 0]])
"""

from ultraep.workload.files import loads_of_windows, read_loads, read_routing, recorded_loads
from ultraep.workload.generators import (
    IMBALANCES,
    KINDS,
    Load,
    drifting,
    ids_with,
    sweep,
    zipf,
)

__all__ = [
    "IMBALANCES",
    "KINDS",
    "Load",
    "drifting",
    "ids_with",
    "loads_of_windows",
    "read_loads",
    "read_routing",
    "recorded_loads",
    "sweep",
    "zipf",
]
