"""Plain NumPy and Python: slow and simple, the definition of correct plans."""

from ultraep.backends.reference.place import lower_bound, place
from ultraep.backends.reference.reroute import count, reroute, split, tally

__all__ = ["count", "lower_bound", "place", "reroute", "split", "tally"]
