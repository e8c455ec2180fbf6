"""How a stage is computed: the same names and signatures in every backend.

A backend knows no rank: integers, arrays and `Limits` in, arrays out. It offers

    count(...)        rows of every expert, from the router's ids
    place(...)        which expert is copied where, and how many tokens each copy serves
    lower_bound(...)  the least that the fullest rank can hold, whatever the plan
    split(...)        how many tokens of every source rank each copy serves
    reroute(...)      the order of sending, and the rows of every slot
    tally(...)        what every rank serves and holds in the end
    DEVICE            the type of the tensors that `count` and `reroute` take instead of arrays

`reference` is slow, obvious and the definition of correct; every other backend gives its bits.
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
    """A backend by name: its module, where it runs, what it needs, and how to get that."""

    name: str
    module: str
    device: str  # type of the tensors that it is made for
    needs: str | None
    hint: str

    @property
    def obstacle(self) -> str:
        """Why it cannot be used here; empty if it can."""
        if self.needs is not None and importlib.util.find_spec(self.needs) is None:
            return f"needs {self.needs}, which is not installed: {self.hint}"
        if self.device != "cpu" and not _gpu_usable():
            return "needs a GPU, and torch sees none (TRITON_INTERPRET=1 runs it slowly without)"
        return ""

    @property
    def available(self) -> bool:
        return not self.obstacle


BACKENDS = (
    BackendInfo("triton", "ultraep.backends.triton", "cuda", "triton", "pip install triton"),
    BackendInfo("cpu", "ultraep.backends.cpu", "cpu", "numba", "pip install numba"),
    BackendInfo("reference", "ultraep.backends.reference", "cpu", None, ""),
)


def backend_names() -> list[str]:
    """Names of all backends."""
    return [info.name for info in BACKENDS]


@cache
def backend_for(device: str = "cpu") -> BackendInfo:
    """The best backend here for tensors of a device type; says so if a better one is missing."""
    for info in BACKENDS:
        if info.device not in (device, "cpu"):
            continue
        obstacle = info.obstacle
        if not obstacle:
            return info
        logger.warning("backend %r %s; using a slower one", info.name, obstacle)
    raise AssertionError("the reference backend needs nothing and is always available")


def select(name: str | None = None, device: str = "cpu") -> ModuleType:
    """The backend of that name, or the best one for a device. An explicit choice never falls back.

    device: a type of torch devices, where ids or loads are.

    Without a name, `reference` stands in for `cpu` until the compiled functions are on disk. The
    name "cpu" loads or compiles them now.
    """
    if name is None:
        name = backend_for(device).name
        if name == "cpu" and not PLANNER.ready():
            name = "reference"
    return _named(name)


@cache
def _named(name: str) -> ModuleType:
    info = next((info for info in BACKENDS if info.name == name), None)
    if info is None:
        raise ConfigError(f"unknown backend {name!r}; known are {', '.join(backend_names())}")
    obstacle = info.obstacle
    if obstacle:
        raise BackendUnavailable(f"backend {name!r} {obstacle}")
    if name == "cpu":
        PLANNER.wait()
    return importlib.import_module(info.module)


def compile_in_background() -> None:
    """Have the planner compiled, unless it is on disk; plans come from `reference` meanwhile."""
    if backend_for().name == "cpu":
        PLANNER.request()


def wait_until_compiled() -> None:
    """Load or compile the planner now, before anything is timed."""
    _named(backend_for().name)


@cache
def _gpu_usable() -> bool:
    device = importlib.import_module("ultraep.backends.triton.device")
    usable: bool = device.usable()
    return usable
