"""Settings of a balancer, checked before anything is allocated and equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from ultraep.backends import select
from ultraep.comm import Peers
from ultraep.config import AUTO, check_choice, check_integer, check_timeout
from ultraep.dispatch import Dispatcher
from ultraep.errors import ConfigError, LoadError
from ultraep.hops import MODES
from ultraep.plan import Plan
from ultraep.topology import Topology

MAY_DIFFER = ("backend", "kernels", "timeout", "peers")  # between ranks


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a balancer works.

    data_plane, capacity, in_flight, timeout, dispatcher: see `Balancer`.

    Only tests and benchmarks choose the others, with `Balancer._with_settings`:
    backend: "cpu" or "reference"; None: the faster one.
    kernels: whether kernels count, plan and reroute on the messages plane; None: on GPUs.
    relay: how weights travel, "direct", "chain", or "auto": the faster one for each plan.
    peers: memory that the ranks map; None: the data plane maps it.
    """

    data_plane: str = AUTO
    capacity: int | str = AUTO
    in_flight: int = 1
    timeout: float | None = None
    dispatcher: Dispatcher | None = None
    backend: str | None = None
    kernels: bool | None = None
    relay: str = "auto"
    peers: Peers | None = None

    def __post_init__(self) -> None:
        if self.backend is not None:
            select(self.backend)
        check_choice("relay", self.relay, MODES)
        check_integer("in_flight", self.in_flight, least=1)
        if self.capacity != AUTO:
            check_integer(f"capacity, unless it is {AUTO!r},", self.capacity, least=1)
        check_timeout(self.timeout)
        _check_dispatcher(self.dispatcher)

    def check_rows(self, plan: Plan) -> None:
        """Raise if a rank serves more rows than the capacity."""
        most, rank = int(plan.rank_loads.max()), int(plan.rank_loads.argmax())
        if isinstance(self.capacity, int) and most > self.capacity:
            raise LoadError(
                f"a plan with {most} rows on rank {rank}, but the buffers are for {self.capacity}: "
                "pass a larger capacity= to the balancer, or none outside of graphs"
            )

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


def experts_and_homes(experts: int | Sequence[int]) -> tuple[int, Sequence[int] | None]:
    """Return the number of experts, and the home rank of each one if they are given.

    >>> experts_and_homes(8), experts_and_homes([0, 0, 1])
    ((8, None), (3, [0, 0, 1]))
    """
    if isinstance(experts, (Sequence, np.ndarray)) and not isinstance(experts, str):
        return len(experts), experts
    return experts, None


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
