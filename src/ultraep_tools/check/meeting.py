"""Meeting: values of all ranks through the store of the launcher; ranks that do not come are named.

Messages of a process group cannot say which rank never started. The store can: every rank writes
its value under its own key.
"""

from __future__ import annotations

import json
import os
import re
import time
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from ultraep.errors import CommunicationError, ConfigError
from ultraep_tools.check.report import listed
from ultraep_tools.launch.processes import RankPlace

POLL = 0.05  # seconds


class Meeting:
    """The ranks that torchrun started. Creating one connects to the store, and to nothing else.

    hosts: of the ranks, as soon as they are known.
    """

    def __init__(self, place: RankPlace, timeout: float) -> None:
        self.place, self.timeout, self.hosts = place, timeout, [""] * place.size
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = PrefixStore(f"ultraep check {attempt}", _connect(place, timeout))

    def gather(self, name: str, value: object = None, patience: int = 1) -> list[Any]:
        """Return the values of all ranks; raise with the ranks that are missing after the timeout.

        patience: how many timeouts to wait.
        """
        keys = [f"{name}/{rank}" for rank in range(self.place.size)]
        limit = patience * self.timeout
        deadline = time.monotonic() + limit
        try:
            self.store.set(keys[self.place.rank], json.dumps(value))
            while not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(POLL)
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            if not missing:
                return [json.loads(value) for value in self.store.multi_get(keys)]
        except RuntimeError:
            text = f"the store of rank 0 was lost at '{name}'"
            raise CommunicationError(self.with_hosts(text), ranks=[0]) from None
        names = listed([f"rank {rank}" for rank in missing])
        text = f"{names} did not come to '{name}' within {limit:g} s"
        raise CommunicationError(self.with_hosts(text), ranks=missing)

    def with_hosts(self, text: str) -> str:
        """Add to every rank in the text its host, if ranks are on several hosts."""
        if len(set(self.hosts)) == 1:
            return text
        return re.sub(r"\brank (\d+)", lambda rank: f"{rank[0]} ({self.hosts[int(rank[1])]})", text)

    def leave(self) -> None:
        """Leave; the rank that may hold the store waits until the others have left."""
        if self.place.rank == 0:
            self.gather("the end")
        else:
            self.store.set(f"the end/{self.place.rank}", "null")


def _connect(place: RankPlace, timeout: float) -> Store:
    """Return the store of torchrun, or one that rank 0 holds."""
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise ConfigError(
            "RANK and WORLD_SIZE are set, but MASTER_ADDR and MASTER_PORT are not; start the ranks "
            "with torchrun"
        ) from None
    held_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store: Store = TCPStore(
            address,
            port,
            is_master=place.rank == 0 and not held_by_torchrun,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise CommunicationError(
            f"rank 0 did not come within {timeout:g} s: no store at {address}:{port} ({reason})",
            ranks=[0],
        ) from None
    return store
