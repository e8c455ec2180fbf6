"""Compiled with numba: the bits of the reference, about a thousand times faster."""

from ultraep.backends.cpu.bound import lower_bound
from ultraep.backends.cpu.count import count
from ultraep.backends.cpu.level import level
from ultraep.backends.cpu.place import place
from ultraep.backends.cpu.reroute import reroute
from ultraep.backends.cpu.split import split
from ultraep.backends.cpu.tally import tally

__all__ = ["DEVICE", "count", "level", "lower_bound", "place", "reroute", "split", "tally"]

DEVICE = "cpu"
