"""DataPlane: memory that ranks share, and what moves through it: weights, rows, gradients.

Every verb launches kernels and returns at once. A region is written only after all ranks have read
what stood there: each meeting of the ranks says so for everything that was read before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ultraep.backends.triton.board import Board
from ultraep.backends.triton.exchange import Exchange, RegionLayout
from ultraep.backends.triton.grouped import multiprocessors
from ultraep.backends.triton.reducer import pull
from ultraep.backends.triton.streamer import Streamer
from ultraep.bundle import Layout
from ultraep.comm import Peers, Region
from ultraep.errors import LoadError, SlotError
from ultraep.runtime.overlap import Overlap
from ultraep.topology import Topology


class DataPlane:
    """The shared memory of one rank. Regions are allocated at their first use, by all ranks."""

    def __init__(
        self,
        peers: Peers,
        topology: Topology,
        *,
        tokens: int,
        top_k: int,
        capacity: int,
        relay: str,
        buffers: int,
        timeout: float,
        sms: int | None,
        budget: int | None,
        streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None,
    ) -> None:
        self.peers, self.topology, self.capacity = peers, topology, capacity
        self.sms = sms or multiprocessors(peers.device)
        self.overlap = Overlap(peers.device, streams)
        self.board = Board(peers, slots=topology.slots, buffers=buffers, timeout=timeout)
        # Programs of a relay wait for each other, so all must fit on the device at once: two on a
        # multiprocessor do, with room for others. Those that only pull may queue.
        moving, pulling = 2 * (budget or self.sms), 4 * self.sms
        if peers.device.type == "cpu":
            moving, pulling = 1, 2
        self.streamer = Streamer(self.board, topology, relay=relay, programs=moving)
        self._pull_programs = pulling
        layout = RegionLayout(
            first_slot_of_rank=topology.first_slot_of_rank,
            tokens=tokens,
            top_k=top_k,
            capacity=capacity,
        )
        tables = peers.allocate("tables", layout.table_bytes)
        self.exchange = Exchange(layout, rank=peers.rank, tables=tables, programs=self.sms)
        self._loads = peers.allocate("loads", self.board.table_bytes(topology.experts))
        # Kept, not made anew: if a rank is lost, it holds loads of a step before, and no nonsense.
        self._gathered = torch.zeros(
            topology.ranks, topology.experts, dtype=torch.int32, device=peers.device
        )
        self._borrowers: list[str | None] = [None] * buffers
        self._regions: dict[str, Region] = {}
        self._read: set[str] = set()  # since the last meeting

    def prepare(self, layout: Layout, parameters: int, row_bytes: int) -> None:
        """Allocate what layers of these weights and rows need."""
        for buffer in range(len(self._borrowers)):
            self.slots(layout, buffer)
        if self.topology.slots:
            self.gradients(parameters, torch.float32)
        self.region("values", self.exchange.layout.value_bytes(row_bytes))
        self.region("served", self.exchange.layout.served_bytes(row_bytes))

    def share_loads(self, loads_E: torch.Tensor, kind: int) -> torch.Tensor:
        """[R, E] the loads of all ranks, from those of this one; all must be of one kind."""
        self.board.share("loads", loads_E, self._loads, self._gathered, kind)
        self._read.clear()
        return self._gathered

    def meet(self) -> None:
        """What every rank has written, all can read afterwards."""
        self.board.meet("rows")
        self._read.clear()

    def region(self, kind: str, nbytes: int) -> Region:
        """The memory of that kind and size, of all ranks."""
        name = f"{kind} of {nbytes} bytes"
        if name not in self._regions:
            self._regions[name] = self.peers.allocate(name, nbytes)
        return self._regions[name]

    def to_write(self, kind: str, nbytes: int) -> Region:
        """The same, when nobody reads it any more."""
        if kind in self._read:
            self.meet()
        return self.region(kind, nbytes)

    def to_read(self, kind: str, nbytes: int) -> Region:
        """The same, to be read until the next meeting."""
        self._read.add(kind)
        return self.region(kind, nbytes)

    @contextmanager
    def lend(self, borrower: str) -> Iterator[int]:
        """The number of a free buffer of spare slots."""
        if None not in self._borrowers:
            raise SlotError(
                f"{borrower} needs spare slots, all {len(self._borrowers)} are lent to "
                f"{', '.join(map(str, self._borrowers))}: let it finish, or give in_flight="
            )
        buffer = self._borrowers.index(None)
        self._borrowers[buffer] = borrower
        try:
            yield buffer
        finally:
            self._borrowers[buffer] = None

    def slots(self, layout: Layout, buffer: int) -> Region:
        """`[slots, bytes]` of every rank."""
        return self.region(f"slots {buffer}", max(1, self.topology.slots) * layout.nbytes)

    def reduce(self, gradients_HP: torch.Tensor, made: torch.Tensor) -> None:
        """Add the gradients of all copies to those of the home experts, in place, aside.

        To be joined before the next meeting of rows, which frees the memory of the copies.
        """
        rows = self.gradients(gradients_HP.shape[1], gradients_HP.dtype)
        with self.overlap.aside("gradients"):
            self.board.meet("gradients")
            pull(gradients_HP, rows, made, self.streamer, programs=self._pull_programs)
        self._read.add("gradients")

    def gradients(self, width: int, dtype: torch.dtype) -> Region:
        """`[slots, P]` of every rank."""
        return self.region(f"gradients {dtype}", self.topology.slots * width * dtype.itemsize)

    def free_gradients(self) -> None:
        """From here on, nobody reads the gradients of copies of the backward pass before."""
        if "gradients" in self._read:
            self.meet()

    def check(self) -> None:
        """Raise what the device has noted; waits for it."""
        self.board.check()
        times, most = self.exchange.faults.tolist()
        if times:
            self.exchange.faults.zero_()
            raise LoadError(
                f"{most} rows for rank {self.peers.rank}, but its buffers are for {self.capacity}: "
                f"give a larger capacity= (this happened {times} times)"
            )
