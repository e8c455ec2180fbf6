"""Backends that plan on the host, with the same functions in each, and the kernels of GPUs.

A backend does not know its rank: it takes integers, arrays and `Limits`, and returns arrays.

    count(...)        rows of every expert, from the router's ids
    place(...)        which experts are replicated where, and how many rows each replica serves
    lower_bound(...)  the least load of the fullest rank that any plan can reach
    split(...)        how many rows of every source rank each replica serves
    reroute(...)      the sending order, and the rows of every slot
    tally(...)        rows that every rank serves, and the slot of every replica

`reference` is slow and simple, and defines the correct plans; `cpu` compiles its functions. The
kernels in `triton` return the same bits; `DevicePlanner` of the runtime launches them.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from functools import cache
from types import ModuleType

from ultraep.errors import BackendUnavailable, ConfigError

BACKENDS = ("cpu", "reference")  # modules of this package

logger = logging.getLogger("ultraep")


def backend_names() -> list[str]:
    return list(BACKENDS)


def select(name: str | None = None) -> ModuleType:
    """Return the backend of that name, or the best one. A name never falls back.

    The first call loads the compiled functions from disk. On a new machine it compiles them.
    """
    return _best() if name is None else _named(str(name))


@cache
def _best() -> ModuleType:
    try:
        return _named("cpu")
    except BackendUnavailable as error:
        logger.warning("%s; planning with the slower reference backend", error)
        return _named("reference")


@cache
def _named(name: str) -> ModuleType:
    if name not in BACKENDS:
        raise ConfigError(f"unknown backend {name!r}; choose from {', '.join(BACKENDS)}")
    if name == "cpu" and importlib.util.find_spec("numba") is None:
        raise BackendUnavailable("backend 'cpu' needs numba: pip install numba")
    try:
        backend = importlib.import_module(f"ultraep.backends.{name}")
    except RuntimeError as error:  # numba finds no cache directory
        raise BackendUnavailable(
            f"backend 'cpu' cannot be used: {error}; set NUMBA_CACHE_DIR to a writable directory"
        ) from None
    if name == "cpu":
        backend.load_or_compile()
    return backend


@cache
def kernels_obstacle() -> str:
    """Return why the Triton kernels cannot run here; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton kernels need triton: pip install triton"
    if not importlib.import_module("ultraep.backends.triton.device").usable():
        return (
            "Triton kernels need a GPU, but torch found none (TRITON_INTERPRET=1 runs them slowly "
            "without)"
        )
    return ""


@cache
def has_kernels(device_type: str) -> bool:
    """Return whether the kernels run on this type of device; log why they do not run on a GPU."""
    if device_type == "cuda" and kernels_obstacle():
        logger.warning("%s; using slower code", kernels_obstacle())
    return device_type == "cuda" and not kernels_obstacle()
