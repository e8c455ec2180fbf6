"""The functions of `reference`, compiled with numba: equal plans, about a thousand times faster.

Numba takes about half a minute to compile them and caches them on disk. A file in its cache
directory says that all of them are there.
"""

import fcntl
import hashlib
import logging
from contextlib import ExitStack, suppress
from importlib import import_module
from inspect import isfunction
from pathlib import Path

import numba
import numpy as np
from numba.core.registry import cpu_target
from numba.extending import register_jitable

from ultraep.backends import reference
from ultraep.backends.limits import Limits
from ultraep.config import BalanceConfig
from ultraep.topology import Topology

__all__ = ["count", "lower_bound", "place", "reroute", "split", "tally"]

MODULES = ("heuristics", "search", "place", "reroute")
BACKENDS = Path(__file__).parents[1]
SOURCES = ("cpu/*.py", "reference/*.py", "limits.py", "../config.py", "../arrays.py")
STAMP, COMPLETE, LOCK = "ultraep-sources", "ultraep-compiled", "ultraep-compile.lock"

logger = logging.getLogger("ultraep")


def discard_stale(folder: Path) -> str:
    """Remove numba's indices from its cache if they were written for other sources.

    Numba compiles a function again when its own file changes, but keeps it when a function that it
    calls, or a constant that it uses, changes in another file. Returns a digest of the sources.
    """
    paths = sorted(path for pattern in SOURCES for path in BACKENDS.glob(pattern))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
    with suppress(OSError):  # a folder that cannot be written keeps what it has
        if not (folder / STAMP).exists() or (folder / STAMP).read_text() != digest:
            for outdated in (*folder.glob("*.nbi"), *folder.glob(f"{COMPLETE}-*")):
                outdated.unlink(missing_ok=True)
            (folder / STAMP).write_text(digest)
    return digest


for module in (import_module(f"{reference.__name__}.{name}") for name in MODULES):
    for function in vars(module).values():
        if isfunction(function) and function.__module__ == module.__name__:
            register_jitable(function)  # compiled functions may call it

count, lower_bound, place, reroute, split, tally = (
    numba.njit(cache=True)(getattr(reference, name)) for name in __all__
)
cache_folder = Path(place.stats.cache_path)
_sources = discard_stale(cache_folder)  # before the first call loads any
_target = _sources, numba.__version__, cpu_target.target_context.codegen().magic_tuple()
complete = cache_folder / f"{COMPLETE}-{hashlib.sha256(repr(_target).encode()).hexdigest()[:16]}"


def load_or_compile() -> None:
    """Load every function from the disk; compile them if no other process on this host does."""
    with ExitStack() as stack:
        if not complete.exists():
            with suppress(OSError):  # another user's file, or a file system without locks
                file = stack.enter_context(open(cache_folder / LOCK, "ab"))
                fcntl.flock(file, fcntl.LOCK_EX)
        if not complete.exists():
            logger.warning("ultraep: compiling the planner, once per machine: half a minute")
        load()
        with suppress(OSError):
            complete.touch()


def load() -> None:
    """Load every function from the disk, or compile it: call it with the types of real calls."""
    topology = Topology(ranks=2, experts=2)
    homes, limits = topology.home_of_expert, Limits.of(topology, BalanceConfig())
    ids_N = np.zeros(4, np.int64)
    loads_E, _ = count(ids_N, topology.experts)
    loads_RE = np.stack([loads_E, loads_E])
    lower_bound(2 * loads_E, limits)
    placed_C3 = place(2 * loads_E, limits)
    split_CR = split(loads_RE, homes, placed_C3, True)
    tally(2 * loads_E, homes, placed_C3, topology.ranks)
    experts, hosts, _ = placed_C3.T.copy()
    slots = topology.spare_slot(hosts, np.zeros_like(hosts))
    loads_E.flags.writeable = False  # as in a plan
    reroute(ids_N, loads_E, topology.home_slot_of_expert, experts, slots, split_CR[:, 0].copy(), 4)
