"""Backends that compute the stages, with the same functions in each.

A backend does not know its rank: it takes integers, arrays and `Limits`, and returns arrays.

    count(...)        rows of every expert, from the router's ids
    place(...)        which experts are replicated where, and how many rows each replica serves
    lower_bound(...)  the least load of the fullest rank that any plan can reach
    split(...)        how many rows of every source rank each replica serves
    reroute(...)      the sending order, and the rows of every slot
    tally(...)        rows that every rank serves, and the slot of every replica
    DEVICE            device type of the tensors that `count` and `reroute` also accept

`reference` is slow and simple, and defines the correct plans; all backends return equal bits.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from ultraep.backends.compiling import PLANNER
from ultraep.errors import BackendUnavailable, ConfigError

logger = logging.getLogger("ultraep")


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """Name, device and requirement of a backend, which is the module `ultraep.backends.NAME`."""

    name: str
    device: str  # type of the tensors that it serves
    needs: str | None = None  # package

    @property
    def obstacle(self) -> str:
        """Why the backend cannot be used here; empty if it can."""
        if self.needs is not None and importlib.util.find_spec(self.needs) is None:
            return f"needs {self.needs}, which is not installed: pip install {self.needs}"
        if self.device != "cpu" and not _gpu_usable():
            return "needs a GPU, but torch found none (TRITON_INTERPRET=1 runs it slowly without)"
        return ""

    @property
    def available(self) -> bool:
        return not self.obstacle


BACKENDS = (
    BackendInfo("triton", "cuda", "triton"),
    BackendInfo("cpu", "cpu", "numba"),
    BackendInfo("reference", "cpu"),
)


def backend_names() -> list[str]:
    """Return the names of all backends."""
    return [info.name for info in BACKENDS]


@cache
def backend_for(device: str = "cpu") -> BackendInfo:
    """Return the best available backend for a device type; log which better ones are missing."""
    for info in BACKENDS:
        if info.device in (device, "cpu"):
            if info.available:
                return info
            logger.warning("backend %r %s; using a slower one", info.name, info.obstacle)
    raise AssertionError("the reference backend needs nothing and is always available")


def select(name: str | None = None, device: str = "cpu") -> ModuleType:
    """Return the backend of that name, or the best one for a device. A name never falls back.

    device: torch device type of the ids or loads.

    Without a name, `reference` replaces `cpu` while a child process compiles the functions. The
    name "cpu" loads or compiles them now.
    """
    if name is None:
        name = backend_for(device).name
        if name == "cpu" and not PLANNER.ready():
            name = "reference"
    return _named(str(name))


@cache
def _named(name: str) -> ModuleType:
    info = next((info for info in BACKENDS if info.name == name), None)
    if info is None:
        raise ConfigError(f"unknown backend {name!r}; choose from {', '.join(backend_names())}")
    if not info.available:
        raise BackendUnavailable(f"backend {name!r} {info.obstacle}")
    if name == "cpu":
        PLANNER.wait()
    return importlib.import_module(f"ultraep.backends.{name}")


def wait_until_compiled() -> None:
    """Load or compile the planner now, before anything is timed."""
    _named(backend_for().name)


@cache
def _gpu_usable() -> bool:
    device = importlib.import_module("ultraep.backends.triton.device")
    usable: bool = device.usable()
    return usable
