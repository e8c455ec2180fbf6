"""Compiled with numba: plans equal to the reference, about a thousand times faster."""

from pathlib import Path

from ultraep.backends.cpu.place import lower_bound, place
from ultraep.backends.cpu.reroute import count, reroute, split, tally
from ultraep.backends.cpu.stale import discard_stale

__all__ = ["DEVICE", "count", "lower_bound", "place", "reroute", "split", "tally"]

DEVICE = "cpu"

for function in (place, split):  # before the first call loads any; numba caches beside the sources
    discard_stale(Path(function.stats.cache_path))
