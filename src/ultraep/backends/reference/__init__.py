"""Plain NumPy and Python: slow, obvious, the definition of correct."""

from ultraep.backends.reference.bound import lower_bound
from ultraep.backends.reference.count import count
from ultraep.backends.reference.level import level
from ultraep.backends.reference.place import place
from ultraep.backends.reference.reroute import reroute
from ultraep.backends.reference.split import split
from ultraep.backends.reference.tally import tally

__all__ = ["DEVICE", "count", "level", "lower_bound", "place", "reroute", "split", "tally"]

DEVICE = "cpu"
