"""Compiled with numba: the bits of the reference, about a thousand times faster."""

from ultraep.backends.cpu.place import lower_bound, place
from ultraep.backends.cpu.reroute import count, reroute
from ultraep.backends.cpu.split import split, tally

__all__ = ["DEVICE", "count", "lower_bound", "place", "reroute", "split", "tally"]

DEVICE = "cpu"
