"""Load the compiled functions from numba's cache on disk, or compile them into it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

import numpy as np
from numba.core import event

from ultraep.backends import cpu
from ultraep.backends.limits import Limits
from ultraep.config import BalanceConfig
from ultraep.topology import Topology

logger = logging.getLogger("ultraep.compile")
NICENESS = 5  # compiling in the background yields to the ranks of this host


class NotOnDisk(Exception):
    """A function would have to be compiled."""


class CompileListener(event.Listener):  # type: ignore[misc]
    """Logs the first compilation of a process, or refuses it in a thread that only loads."""

    logged = False
    loading_thread: int | None = None

    def on_start(self, event: Any) -> None:
        """Numba begins to compile a function that is not in its cache."""
        function = event.data["dispatcher"].py_func
        if not function.__module__.startswith("ultraep."):
            return
        if self.loading_thread == threading.get_ident():
            raise NotOnDisk(function.__qualname__)
        if not self.logged:
            self.logged = True
            logger.info("compiling the planner, which takes a while; later runs load it from disk")

    def on_end(self, event: Any) -> None:
        """Do nothing."""


LISTENER = CompileListener()
event.register("numba:compile", LISTENER)


def load() -> bool:
    """Load all functions without compiling any; return whether all of them were on disk."""
    LISTENER.loading_thread = threading.get_ident()
    try:
        call_all()
    except NotOnDisk:
        return False
    finally:
        LISTENER.loading_thread = None
    return True


def call_all() -> None:
    """Call every function on a tiny problem, with the argument types of real calls."""
    topology = Topology(ranks=2, experts=2)
    homes, limits = topology.home_of_expert, Limits.of(topology, BalanceConfig())
    ids_N = np.zeros(4, np.int64)
    loads_E, _ = cpu.count(ids_N, topology.experts)
    loads_RE = np.stack([loads_E, loads_E])
    cpu.lower_bound(2 * loads_E, limits)
    placed_C3 = cpu.place(2 * loads_E, limits)
    split_CR = cpu.split(loads_RE, homes, placed_C3, True)
    cpu.tally(2 * loads_E, homes, placed_C3, topology.ranks)
    experts, hosts, _ = placed_C3.T.copy()
    slots = topology.spare_slot(hosts, np.zeros_like(hosts))
    loads_E.flags.writeable = False  # as in a plan
    cpu.reroute(
        ids_N, loads_E, topology.home_slot_of_expert, experts, slots, split_CR[:, 0].copy(), 4
    )


def cache_folder() -> str:
    """The directory where numba keeps the compiled planner."""
    folder: str = cpu.place.stats.cache_path
    return folder


def main() -> None:
    """Fill the cache, as a child process whose parent may end at any time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(NICENESS)
    call_all()


def _end_with_parent() -> None:
    """Wait until the parent closes its end of the pipe to stdin, which its death does too."""
    os.read(0, 1)
    os._exit(1)
