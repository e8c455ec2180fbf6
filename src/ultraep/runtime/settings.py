"""Settings of a balancer, checked before anything is allocated and equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ultraep.backends import select
from ultraep.config import AUTO, check_choice, check_integer, check_timeout
from ultraep.hops import MODES
from ultraep.runtime.capacity import STATIC

if TYPE_CHECKING:
    import torch

TRANSPORTS = ("auto", "shared", "sockets")
MAY_DIFFER = ("backend", "timeout", "share")  # between ranks


@dataclass(frozen=True)
class DeviceShare:
    """The part of a GPU that a rank may use, where several ranks share one.

    sms: multiprocessors of this rank; None: all.   budget: how many of them move weights.
    stream: on which weights move; None: a new one.
    """

    sms: int | None = None
    budget: int | None = None
    stream: torch.cuda.Stream | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a balancer works; see `Balancer`."""

    backend: str | None = None
    relay: str = "auto"
    chunks: int = 4
    in_flight: int = 1
    verify: bool = True
    transport: str = "auto"
    data_plane: str = "auto"
    tokens: int | None = None
    capacity: int | str = AUTO
    timeout: float | None = None
    share: DeviceShare | None = None

    def __post_init__(self) -> None:
        if self.backend is not None:
            select(self.backend)
        check_choice("relay", self.relay, MODES)
        check_choice("transport", self.transport, TRANSPORTS)
        for name in ("chunks", "in_flight", "tokens"):
            value = getattr(self, name)
            if value is not None:
                check_integer(name, value, least=1)
        if self.capacity not in (AUTO, STATIC):
            check_integer(f"capacity, unless it is {AUTO!r} or {STATIC!r},", self.capacity, least=1)
        check_timeout(self.timeout)

    def compared(self) -> str:
        """Return the settings that must be equal on all ranks, as text."""
        return ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.name not in MAY_DIFFER
        )
