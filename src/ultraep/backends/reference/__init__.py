"""Plain NumPy and Python: slow, obvious, the definition of correct."""

from ultraep.backends.reference.place import lower_bound, place
from ultraep.backends.reference.reroute import count, reroute
from ultraep.backends.reference.split import split, tally

__all__ = ["DEVICE", "count", "lower_bound", "place", "reroute", "split", "tally"]

DEVICE = "cpu"
