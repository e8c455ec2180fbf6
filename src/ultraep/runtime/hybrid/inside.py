"""Inside: how replicas and rows move inside of one fast-link domain. By messages here.

Shapes: T' tokens of a rank, with those that arrive from other domains; K experts per token.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ultraep.arrays import IntArray
from ultraep.bundle import Bundle, Layout, device_of_bundle, resolve
from ultraep.microbatch import MicrobatchInfo, Replicas
from ultraep.plan import Plan
from ultraep.reroute import Routes
from ultraep.runtime.messages.plane import RowMessages
from ultraep.runtime.messages.replicas import MessageReplicas
from ultraep.runtime.messages.slots import SlotPool
from ultraep.runtime.microbatch import Shared
from ultraep.runtime.observe import BaseExchange


class Size(NamedTuple):
    """The size of a microbatch inside of a domain, over its ranks."""

    tokens: int  # the most T'
    top_k: int
    rows: int  # the most that a rank serves


class Inside(Protocol):
    """Moves replicas and rows between the ranks of a domain. Plans and slots are its own."""

    def fit(self, size: Size) -> Any:
        """Return memory for a microbatch of this size; collective if it is allocated."""

    def prepare(self, size: Size, rows: torch.Tensor, bundle: Bundle) -> None:
        """Allocate all memory that microbatches like this need; collective in the domain."""

    def replicas(
        self,
        memory: Any,
        info: MicrobatchInfo,
        plan: Plan,
        bundle: Bundle,
        versions: IntArray,
        device: torch.device,
    ) -> Replicas:
        """Return the replicas of a plan; versions: of the weights of all ranks."""

    def trial(
        self,
        memory: Any,
        info: MicrobatchInfo,
        plan: Plan,
        bundle: Bundle,
        number: int,
        device: torch.device,
    ) -> Replicas:
        """Return the replicas of a synthetic plan, to be timed; every number is used once."""

    def rows(
        self, memory: Any, info: MicrobatchInfo, routes: Routes, slots: torch.Tensor
    ) -> BaseExchange:
        """Return the exchange of the rows with these `[T', K]` slots, which no observer sees."""

    def at_backward(self, replicas: Replicas | None) -> None:
        """Called when backward begins, before its first row moves."""

    @property
    def nbytes(self) -> int: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class MessagesInside:
    """A domain whose ranks send messages."""

    def __init__(self, shared: Shared, pool: SlotPool) -> None:
        self._shared, self._pool = shared, pool

    def fit(self, size: Size) -> None:
        """Do nothing: messages need no memory of a fixed size."""

    def prepare(self, size: Size, rows: torch.Tensor, bundle: Bundle) -> None:
        """Allocate one buffer of spare slots."""
        del size, rows
        tensors = resolve(bundle)
        homes = len(self._shared.topology.home_experts(self._shared.comm.rank))
        with self._pool.lend(Layout.of(tensors, homes), device_of_bundle(tensors), "prepare()"):
            pass

    def replicas(
        self,
        memory: None,
        info: MicrobatchInfo,
        plan: Plan,
        bundle: Bundle,
        versions: IntArray,
        device: torch.device,
    ) -> MessageReplicas:
        del memory
        return MessageReplicas(self._shared, self._pool, info, plan, bundle, versions, device)

    def trial(
        self,
        memory: None,
        info: MicrobatchInfo,
        plan: Plan,
        bundle: Bundle,
        number: int,
        device: torch.device,
    ) -> MessageReplicas:
        del memory
        versions = np.full(plan.topology.ranks, number)  # no slot holds this version
        shared = self._shared.unobserved()
        return MessageReplicas(shared, self._pool, info, plan, bundle, versions, device)

    def rows(
        self, memory: None, info: MicrobatchInfo, routes: Routes, slots: torch.Tensor
    ) -> RowMessages:
        del memory, slots
        return RowMessages(routes, self._shared.unobserved(), info)

    def at_backward(self, replicas: Replicas | None) -> None:
        """Do nothing: replicas are sent again when the experts need them."""

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes

    def check(self) -> None:
        """Do nothing: messages raise their errors at once."""

    def close(self) -> None:
        """Do nothing: only memory was allocated."""
