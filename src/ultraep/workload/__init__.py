"""Where loads come from: seeded generators, recorded routing, and files.

>>> loads = one_hot(ranks=2, experts=4, tokens=3, expert=1)
>>> loads
array([[0, 3, 0, 0],
       [0, 3, 0, 0]])
"""

from ultraep.workload.files import loads_of_windows, read_loads, read_routing
from ultraep.workload.generators import lognormal, one_hot, topic_shift, uniform, zipf

__all__ = [
    "loads_of_windows",
    "lognormal",
    "one_hot",
    "read_loads",
    "read_routing",
    "topic_shift",
    "uniform",
    "zipf",
]
