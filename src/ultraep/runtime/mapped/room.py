"""Room: what microbatches up to some size need, buffers of the control plane and shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ultraep.bundle import Layout, Stack
from ultraep.comm import Peers
from ultraep.config import BalanceConfig
from ultraep.ops.products import accumulator
from ultraep.runtime.control import ControlPlane
from ultraep.runtime.mapped.memory import MappedMemory
from ultraep.runtime.settings import DeviceShare, Settings
from ultraep.topology import Topology


@dataclass(frozen=True, eq=False)
class Room:
    """Memory for microbatches of so many tokens. To make one is collective."""

    control: ControlPlane
    memory: MappedMemory
    _notes: Notes

    @classmethod
    def of(
        cls,
        peers: Peers,
        topology: Topology,
        config: BalanceConfig,
        settings: Settings,
        name: str,
        tokens: int,
        top_k: int,
        capacity: int,
        timeout: float,
    ) -> Room:
        """The room of that name, for so many tokens of every rank, and rows that it serves."""
        control = ControlPlane(
            topology, config, rows=tokens * top_k, rank=peers.rank, device=peers.device
        )
        memory = MappedMemory(
            peers,
            topology,
            name=name,
            tokens=tokens,
            top_k=top_k,
            capacity=capacity,
            relay=settings.relay,
            buffers=settings.in_flight,
            timeout=timeout,
            share=settings.share or DeviceShare(),
        )
        return cls(control, memory, Notes(peers.device))

    def fits(self, tokens: int, top_k: int) -> bool:
        return top_k == self.memory.top_k and tokens <= self.memory.tokens

    def prepare(self, tensors: Mapping[str, Stack], rows: torch.Tensor) -> None:
        """Allocate what layers of these weights and rows need."""
        memory, layout = self.memory, Layout.of(tensors, self.memory.streamer.homes)
        memory.streamer.sources(layout, tensors)
        memory.streamer.chunks_of_length(layout.nbytes)
        for buffer in range(memory.buffers):
            memory.held_by_all(layout, buffer)
        kinds = {name: (shape, accumulator(dtype)) for name, shape, dtype in layout.parts}
        memory.gradient_slots(kinds)
        row_bytes = rows.shape[-1] * rows.itemsize
        memory.region("values", memory.exchange.layout.value_bytes(row_bytes))
        memory.region("served", memory.exchange.layout.served_bytes(row_bytes))

    def look(self) -> None:
        """Raise what the device has noted, as far as that is known; does not wait."""
        memory, control = self.memory, self.control
        words = (memory.board.words[:1], control.faults, memory.exchange.faults)
        if self._notes.look(words):
            self.check()

    @property
    def seen(self) -> int:
        """The most rows that this rank was planned to serve, as far as that is known."""
        return self._notes.most_rows

    def check(self) -> None:
        """Raise what the device has noted since the last check; waits for it."""
        self._notes.note(int(self.memory.exchange.faults[1]))
        self.memory.check()
        self.control.check()


class Notes:
    """Looks at numbers of the device without waiting for it: at those of some steps ago.

    The last one is no fault: the most rows that ever arrived.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._noted = torch.zeros(6, dtype=torch.int32, pin_memory=self._cuda)
        self._words = self._noted.numpy()  # the same memory; quicker to look at
        self._event: Any = torch.cuda.Event() if self._cuda else None
        self._asked, self.most_rows = False, 0

    def note(self, rows: int) -> None:
        """So many have arrived once."""
        self.most_rows = max(self.most_rows, rows)

    def look(self, words: tuple[torch.Tensor, ...]) -> bool:
        """Whether something was noted, as far as notes have come; asks for the next ones."""
        if self._cuda and torch.cuda.is_current_stream_capturing():
            return False
        if self._asked and self._cuda and not self._event.query():
            return False
        if self._asked:
            self.note(int(self._words[-1]))
        if self._asked and self._words[:-1].any():
            self._asked = False
            return True
        self._noted.copy_(torch.cat(words), non_blocking=True)
        if self._cuda:
            self._event.record()
        self._asked = True
        return False
