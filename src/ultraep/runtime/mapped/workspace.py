"""Workspaces: what microbatches up to some size need, control buffers and shared memory.

Ranks allocate together. Outside of graphs their hosts tell each other how many tokens they have, so
that workspaces grow.

Shapes: T tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ultraep.bundle import Layout, Stack
from ultraep.comm import Peers
from ultraep.errors import LoadError
from ultraep.ops.products import accumulator
from ultraep.runtime.agreement import Agreement, Place
from ultraep.runtime.capacity import Capacity
from ultraep.runtime.control import POLICIES, ControlPlane
from ultraep.runtime.mapped.memory import MappedMemory
from ultraep.runtime.microbatch import Shared
from ultraep.runtime.settings import DeviceShare
from ultraep.runtime.streams import capturing


@dataclass(frozen=True, eq=False)
class Workspace:
    """Memory for microbatches of so many tokens. Creating one is collective."""

    control: ControlPlane
    memory: MappedMemory
    _notes: Notes

    @classmethod
    def of(
        cls, shared: Shared, peers: Peers, name: str, tokens: int, top_k: int, capacity: int
    ) -> Workspace:
        """The workspace of that name, for so many tokens of every rank, and rows that it serves."""
        config, settings = shared.config, shared.settings
        if config.policy not in POLICIES:
            config = replace(config, policy="ultraep")
        control = ControlPlane(
            shared.topology, config, rows=tokens * top_k, rank=peers.rank, device=peers.device
        )
        memory = MappedMemory(
            peers,
            shared.topology,
            name=name,
            tokens=tokens,
            top_k=top_k,
            capacity=capacity,
            relay=settings.relay,
            buffers=settings.in_flight,
            timeout=settings.timeout or shared.comm.timeout,
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


class Workspaces:
    """The workspaces of one rank, of which the last is the largest.

    agreement: of hosts whose messages wait for no device; None: hosts cannot tell each other.
    """

    def __init__(self, shared: Shared, peers: Peers, agreement: Agreement | None) -> None:
        self._shared, self._peers, self.agreement = shared, peers, agreement
        self.capacity = Capacity(shared.settings.capacity, shared.topology, shared.config)
        self._all: list[Workspace] = []
        self._seen = 0  # the most rows that a rank was planned to serve, as far as all know

    def __iter__(self) -> Iterator[Workspace]:
        return iter(self._all)

    @property
    def last(self) -> Workspace:
        return self._all[-1]

    def clear(self) -> None:
        """Free the memory."""
        self._all.clear()

    def for_tokens(self, tokens: int, top_k: int) -> Workspace:
        """The workspace for so many tokens of every rank; collective if it is created."""
        return self._fitting(tokens, top_k) or self._create(tokens, top_k)

    def for_microbatch(self, ids: torch.Tensor, place: Place, told: str) -> tuple[Workspace, int]:
        """The workspace for the tokens of all ranks, created or enlarged if necessary.

        And the most tokens of a rank, if hosts exchange them, else the tokens that it is made for:
        rates depend on this number, and plans on rates, so it must be the same on all ranks.
        """
        error, asks = _refused(ids), self._shared.settings.verify or not self._all
        tokens, top_k = (0, 0) if error else ids.shape
        if self.agreement is None or not asks or self._alone or capturing(self._peers.device):
            if error:
                raise error
            workspace = self._fitting(tokens, top_k) or self._create_alone(tokens, top_k)
            return workspace, workspace.memory.tokens
        records = self.agreement.loads(
            place,
            torch.zeros(self._shared.topology.experts, dtype=torch.int64),
            told=told,
            version=0,
            refused=int(error is not None),
            tokens=tokens,
            rows=max((workspace.seen for workspace in self._all), default=0),
        )
        if error:
            raise error
        self.agreement.compare_inputs(records, told)
        most, self._seen = (int(records.column(name).max()) for name in ("tokens", "rows"))
        return self.for_tokens(most, top_k), most

    @property
    def _alone(self) -> bool:
        return self._shared.comm.size == 1

    def _fitting(self, tokens: int, top_k: int) -> Workspace | None:
        for workspace in reversed(self._all):
            rows = workspace.memory.capacity
            if workspace.fits(tokens, top_k) and self.capacity.suffices(rows, self._seen):
                return workspace
        return None

    def _create_alone(self, tokens: int, top_k: int) -> Workspace:
        """The first workspace, or any of a single rank: several would have to ask each other."""
        if capturing(self._peers.device) or (self._all and not self._alone):
            has = ", ".join(f"{w.memory.tokens} x {w.memory.top_k}" for w in self._all)
            raise LoadError(
                f"{tokens} tokens x {top_k} choices, but there is memory for {has or 'none'}, and "
                "it cannot grow here: run such a step before, outside of a graph, or give tokens="
            )
        return self._create(tokens, top_k)

    @torch.inference_mode(False)
    def _create(self, tokens: int, top_k: int) -> Workspace:
        """A workspace for so many tokens, by all ranks; microbatches under way keep theirs."""
        shared = self._shared
        tokens = max(1, tokens, shared.settings.tokens or 1)
        largest = max((w.memory.tokens for w in self._all if w.memory.top_k == top_k), default=0)
        if self._all and tokens > largest:  # and somewhat more, as it would grow again
            largest = 1 << (tokens - 1).bit_length()
        tokens = max(tokens, largest)
        rows = self.capacity.rows_for(tokens * top_k, self._seen)
        name = f"room {len(self._all)}"
        workspace = Workspace.of(shared, self._peers, name, tokens, top_k, rows)
        self._all.append(workspace)
        return workspace


def _refused(ids: torch.Tensor) -> LoadError | None:
    """What is wrong with ids at first sight."""
    if ids.ndim != 2:
        return LoadError(f"ids must be [tokens, choices], got {list(ids.shape)}")
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        return LoadError(f"ids must be integers, got {ids.dtype}")
    return None


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
