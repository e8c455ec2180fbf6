"""Settings of a balancer, checked before anything is allocated and equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ultraep.backends import select
from ultraep.config import AUTO, check_choice, check_integer, check_timeout
from ultraep.dispatch import Dispatcher
from ultraep.errors import ConfigError
from ultraep.hops import MODES
from ultraep.runtime.capacity import STATIC
from ultraep.topology import Topology

MAY_DIFFER = ("backend", "timeout")  # between ranks


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a balancer works; see `Balancer`."""

    backend: str | None = None
    relay: str = "auto"
    chunks: int = 4
    in_flight: int = 1
    verify: bool = True
    data_plane: str = "auto"
    tokens: int | None = None
    capacity: int | str = AUTO
    timeout: float | None = None
    dispatcher: Dispatcher | None = None

    def __post_init__(self) -> None:
        if self.backend is not None:
            select(self.backend)
        check_choice("relay", self.relay, MODES)
        for name in ("chunks", "in_flight", "tokens"):
            value = getattr(self, name)
            if value is not None:
                check_integer(name, value, least=1)
        if self.capacity not in (AUTO, STATIC):
            check_integer(f"capacity, unless it is {AUTO!r} or {STATIC!r},", self.capacity, least=1)
        check_timeout(self.timeout)
        _check_dispatcher(self.dispatcher)

    def compared(self) -> str:
        """Return the settings that must be equal on all ranks, as text."""
        compared = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in MAY_DIFFER
        }
        if self.dispatcher is not None:
            compared["dispatcher"] = type(self.dispatcher).__qualname__
        return ", ".join(f"{name}={value!r}" for name, value in compared.items())


def check_slots(dispatcher: object, topology: Topology) -> None:
    """Raise if a dispatcher has a method `check_slots` that refuses the slots of these ranks."""
    check = getattr(dispatcher, "check_slots", None)
    if check is not None:
        check(topology.ranks, int(topology.homes_per_rank.max()) + topology.slots)


def _check_dispatcher(dispatcher: object) -> None:
    for verb in ("dispatch", "combine"):
        if dispatcher is not None and not callable(getattr(dispatcher, verb, None)):
            raise ConfigError(
                f"dispatcher= needs the methods dispatch and combine, but {dispatcher!r} has no "
                f"{verb}(); see docs/dispatchers.md"
            )
