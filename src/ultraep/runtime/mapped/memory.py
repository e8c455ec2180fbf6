"""MappedMemory: the memory that ranks share, through which weights, rows and gradients move.

Every verb launches kernels and returns at once. A region is written only after all ranks have read
its last content: each barrier of the ranks ends everything that was read before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ultraep.backends.triton.exchange import RowExchange, aligned
from ultraep.backends.triton.launch import multiprocessors
from ultraep.backends.triton.signals import NOWHERE, Signals
from ultraep.backends.triton.streamer import Streamer, pull
from ultraep.bundle import Layout
from ultraep.comm import Peers, Region
from ultraep.errors import LoadError, errors_at
from ultraep.microbatch import Context
from ultraep.replicas import TensorSpecs, no_free_slots
from ultraep.runtime.streams import Overlap, capturing

MIN_SMS_TO_SHARE = 64  # multiprocessors of a GPU that can spare some
SHARE = 16  # one in this many is spared
GRADIENTS = "gradients"


class MappedMemory:
    """The shared memory of one rank. All ranks allocate a region at its first use, and together
    replace it by a larger one when they need more.

    numbers: the most that `share` gathers from a rank.   positions: see `Signals`.
    `tokens`, `rows`: the most tokens of a rank, and the most rows that it serves, as all ranks know
        them; regions of rows have this size.
    `position`: words of the position at which ranks meet, compared at every barrier.
    """

    def __init__(
        self,
        peers: Peers,
        context: Context,
        *,
        numbers: int = 0,
        positions: torch.Tensor | None = None,
    ) -> None:
        settings, topology = context.settings, context.topology
        self.peers, self.topology, self.buffers = peers, topology, settings.in_flight
        sms = multiprocessors(peers.device)
        self.overlap = Overlap(peers.device)
        self._first_rank = context.first_rank
        self.signals = Signals(
            peers,
            slots=topology.slots,
            buffers=self.buffers,
            timeout=settings.timeout or context.comm.timeout,
            numbers=numbers,
            positions=positions,
            first_rank=context.first_rank,
        )
        moving, self._pulling, self.beside = _programs(peers.device, sms)
        # A chunk is complete when as many programs have written as the receiver expects.
        moving = min(context.comm.gather_objects(moving))
        self.streamer = Streamer(self.signals, topology, relay=settings.relay, programs=moving)
        fault, first_slots = self.signals.words[:1], topology.first_slot_of_rank
        self.exchange = RowExchange(first_slots, rank=peers.rank, fault=fault, programs=sms)
        self.tokens = self.rows = 1
        self.position = NOWHERE
        self.tables_of = 0  # count of the microbatch whose routes are in the tables
        self._borrowers: list[str | None] = [None] * self.buffers
        self._gradients: dict[tuple[Any, ...], dict[str, GradientSlots]] = {}
        self._regions: dict[str, Region] = {}
        self._kept: set[Region] = set()
        self._slot_tensors: dict[tuple[Layout, int], dict[str, torch.Tensor]] = {}
        self._read: set[str] = set()  # since the last barrier

    def fit(self, tokens: int, rows: int) -> None:
        """Make regions large enough for this many tokens and served rows of a rank.

        All ranks call it with the same numbers.
        """
        self.tokens, self.rows = max(self.tokens, tokens), max(self.rows, rows)

    def share_loads(self, counts: torch.Tensor, gathered: torch.Tensor, *, compared: bool) -> None:
        """Gather what every rank has counted.

        compared: the host compares the positions of all ranks.
        """
        self.signals.share(counts, gathered, self.position, compared=compared)
        self._read.clear()

    def barrier(self) -> None:
        """Make what every rank has written readable for all ranks."""
        self.signals.barrier("rows", self.position)
        self._read.clear()

    def tables(self, top_k: int) -> Region:
        """Return the memory for the routes of one microbatch."""
        return self.region("tables", self.exchange.table_bytes(self.tokens * top_k))

    def served(self, width: int, dtype: torch.dtype, rows: int) -> torch.Tensor:
        """[rows, D] the memory for rows that this rank serves."""
        region = self.region("served", self.rows * width * dtype.itemsize)
        return region.part(0, dtype=dtype, width=width)[:rows]

    def region(self, name: str, nbytes: int) -> Region:
        """Return memory of all ranks with this name and at least this size."""
        region = self._regions.get(name)
        if region is not None and region.local.numel() >= nbytes:
            return region
        return self._allocate(name, aligned(nbytes))

    @torch.inference_mode(False)
    def _allocate(self, name: str, nbytes: int) -> Region:
        if capturing(self.peers.device):
            raise LoadError(
                f"no memory is allocated for '{name} of {nbytes} bytes', and it cannot be "
                "allocated in a graph: run such a step before the capture"
            )
        with errors_at(f"the allocation of memory for {name!r}"):
            region = self.peers.allocate(f"{name} of {nbytes} bytes", nbytes)
        self._regions[name] = region
        if name == GRADIENTS:
            self._gradients.clear()
        return region

    def keep(self) -> None:
        """Never free the present regions: a graph uses them."""
        self._kept.update(self._regions.values())

    def writable(self, name: str, nbytes: int) -> Region:
        """Return a region that no rank reads any more."""
        if name in self._read:
            self.barrier()
        return self.region(name, nbytes)

    def readable(self, name: str, nbytes: int) -> Region:
        """Return a region that this rank reads until the next barrier."""
        self._read.add(name)
        return self.region(name, nbytes)

    @contextmanager
    def lend(self, borrower: str, last: int | None) -> Iterator[int]:
        """Lend a free buffer of spare slots and yield its number, the same on all ranks.

        Prefers the `last` buffer of the borrower.
        """
        free = [number for number, other in enumerate(self._borrowers) if other is None]
        if not free:
            raise no_free_slots(borrower, self._borrowers)
        buffer = last if last in free else free[0]
        self._borrowers[buffer] = borrower
        try:
            yield buffer
        finally:
            self._borrowers[buffer] = None

    @property
    def nbytes(self) -> int:
        """Bytes of this rank in regions."""
        return sum(region.local.numel() for region in {*self._regions.values(), *self._kept})

    def slots(self, layout: Layout, buffer: int) -> Region:
        """Return `[slots, bytes]` of every rank; backward finds them where forward did."""
        nbytes = max(1, self.topology.slots) * layout.nbytes
        return self.region(f"slots {buffer} of {nbytes} bytes", nbytes)

    def slot_tensors(self, layout: Layout, buffer: int) -> dict[str, torch.Tensor]:
        """Return `[slots, ...]` the tensors in the slots of this rank."""
        tensors = self._slot_tensors.get((layout, buffer))
        if tensors is None:
            slots = self.topology.slots
            with torch.inference_mode(False):
                rows = self.slots(layout, buffer).local[: slots * layout.nbytes]
                tensors = layout.views(rows.view(slots, layout.nbytes))
            self._slot_tensors[layout, buffer] = tensors
        return dict(tensors)

    def gradient_slots(self, specs: TensorSpecs) -> dict[str, GradientSlots]:
        """Return memory for the gradients of replicas: blocks `[slots, ...]`, one per tensor."""
        if GRADIENTS in self._read:  # of the backward pass before
            self.barrier()
        slots, key = self.topology.slots, tuple(specs.items())
        if key not in self._gradients and slots:
            begins, end = [], 0
            for shape, dtype in specs.values():
                begins.append(end)
                end += aligned(slots * math.prod(shape) * dtype.itemsize)
            region = self.region(GRADIENTS, end)
            self._gradients[key] = {
                name: GradientSlots(region, begin, slots, *kind)
                for begin, (name, kind) in zip(begins, key, strict=True)
            }
        return self._gradients.get(key, {})

    def reduce(
        self,
        homes: Mapping[str, torch.Tensor],
        own: Mapping[str, torch.Tensor],
        slots: Mapping[str, GradientSlots],
        schedule: torch.Tensor,
        *,
        beside: bool,
    ) -> None:
        """Add the gradients of all replicas to the gradients of the home experts.

        Join the overlap before the next barrier of rows, which frees the gradient slots.
        beside: run on the second stream with a few large programs, beside a product that leaves
            their multiprocessors free.
        """
        self.signals.barrier(GRADIENTS, self.position)
        self._read = {GRADIENTS}
        with self.overlap.aside() if beside else nullcontext():
            for name, of_replicas in slots.items():
                pull(
                    _flat(homes[name]),
                    of_replicas.region,
                    schedule,
                    self.streamer,
                    programs=self.beside if beside else self._pulling,
                    large=beside,
                    own_HP=_flat(own[name]),
                )

    def check(self) -> None:
        """Raise errors that the device has recorded; waits for it."""
        self.signals.check()
        times, most = self.exchange.faults.tolist()
        if times:
            self.exchange.faults.zero_()
            rank = self._first_rank + self.peers.rank
            raise LoadError(
                f"{most} rows for rank {rank}, but a captured graph has room for {self.rows}: "
                f"pass a larger capacity= (this happened {times} times; the outputs of those "
                "microbatches are NaN)",
                ranks=[rank],
            )


def _programs(device: torch.device, sms: int) -> tuple[int, int, int]:
    """Return the programs that move weights, that pull gradients, and that pull beside a product.

    Programs of a relay wait for each other, so all of them must be resident: two fit on a
    multiprocessor beside other work. Programs that only pull may queue.
    """
    if device.type == "cpu":
        return 1, 2, 1
    return 2 * sms, 4 * sms, sms // SHARE if sms >= MIN_SMS_TO_SHARE else 0


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return [H, P] from `[H, ...]`."""
    return tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None]


class GradientSlots:
    """Memory of all ranks for the gradients of their replicas of one tensor."""

    def __init__(
        self, region: Region, begin: int, slots: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.nbytes = math.prod(shape) * dtype.itemsize  # of a replica
        local = region.local[begin : begin + slots * self.nbytes]
        self.local = local.view(dtype).view(slots, *shape)  # of this rank
        self.region = Region(local, region.addresses + begin, region)
