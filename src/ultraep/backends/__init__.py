"""How a stage is computed: the same names and signatures in every backend.

A backend knows no record and no rank: integers and arrays in, arrays out. It offers

    count(...)        rows of every expert, from the router's ids
    place(...)        which expert is copied where, and how many tokens each copy serves
    lower_bound(...)  the least that the fullest rank can hold, whatever the plan
    split(...)        how many tokens of every source rank each copy serves
    reroute(...)      the slot of every row, and the order of sending
    tally(...)        what every rank serves and holds in the end

`reference` is slow, obvious and the definition of correct; every other backend gives its bits.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from ultraep.errors import BackendUnavailable, ConfigError

logger = logging.getLogger("ultraep")


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A backend by name: its module, what it needs, and how to get that."""

    name: str
    module: str
    needs: str | None
    hint: str

    @property
    def available(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


BACKENDS = (
    BackendInfo("cpu", "ultraep.backends.cpu", "numba", "pip install numba"),
    BackendInfo("reference", "ultraep.backends.reference", None, ""),
)


def backend_names() -> list[str]:
    """Names of all backends, the preferred one first."""
    return [info.name for info in BACKENDS]


@cache
def select(name: str | None = None) -> ModuleType:
    """The backend of that name, or the best one here. An explicit choice never falls back."""
    if name is None:
        return _best()
    info = next((info for info in BACKENDS if info.name == name), None)
    if info is None:
        raise ConfigError(f"unknown backend {name!r}; known are {', '.join(backend_names())}")
    if not info.available:
        raise BackendUnavailable(
            f"backend {name!r} needs {info.needs}, which is not installed: {info.hint}"
        )
    return importlib.import_module(info.module)


def _best() -> ModuleType:
    for info in BACKENDS:
        if info.available:
            return importlib.import_module(info.module)
        logger.warning("backend %r is not available (%s), using a slower one", info.name, info.hint)
    raise AssertionError("the reference backend needs nothing and is always available")
