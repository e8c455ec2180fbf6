"""Compiled with numba: plans equal to the reference, about a thousand times faster."""

from ultraep.backends.cpu.place import lower_bound, place
from ultraep.backends.cpu.reroute import count, reroute, split, tally

__all__ = ["DEVICE", "count", "lower_bound", "place", "reroute", "split", "tally"]

DEVICE = "cpu"
