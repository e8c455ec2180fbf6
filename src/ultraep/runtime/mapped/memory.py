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

from ultraep.backends.triton.exchange import RegionLayout, RowExchange, aligned
from ultraep.backends.triton.launch import multiprocessors
from ultraep.backends.triton.signals import Signals
from ultraep.backends.triton.streamer import Streamer, pull
from ultraep.bundle import Layout, Stack
from ultraep.comm import Peers, Region
from ultraep.errors import LoadError, errors_at
from ultraep.microbatch import TensorSpecs
from ultraep.ops.products import accumulator
from ultraep.runtime.microbatch import Context
from ultraep.runtime.replicas import no_free_slots
from ultraep.runtime.streams import Overlap, capturing

MIN_SMS_TO_SHARE = 64  # multiprocessors of a GPU that can spare some
SHARE = 16  # one in this many is spared


class MappedMemory:
    """The shared memory of one rank. All ranks allocate a region at its first use.

    capacity: the most rows that a rank can serve.
    """

    def __init__(
        self, peers: Peers, context: Context, *, tokens: int, top_k: int, capacity: int
    ) -> None:
        settings, topology = context.settings, context.topology
        self.peers, self.topology, self.capacity = peers, topology, capacity
        self.tokens, self.top_k, self.buffers = tokens, top_k, settings.in_flight
        sms = multiprocessors(peers.device)
        self.overlap = Overlap(peers.device)
        timeout = settings.timeout or context.comm.timeout
        self._first_rank = context.first_rank
        self.signals = Signals(
            peers,
            slots=topology.slots,
            buffers=self.buffers,
            timeout=timeout,
            first_rank=context.first_rank,
        )
        moving, self._pulling, self.beside = _programs(peers.device, sms)
        # A chunk is complete when as many programs have written as the receiver expects.
        moving = min(context.comm.gather_objects(moving))
        self.streamer = Streamer(self.signals, topology, relay=settings.relay, programs=moving)
        layout = RegionLayout(
            first_slot_of_rank=topology.first_slot_of_rank,
            tokens=tokens,
            top_k=top_k,
            capacity=capacity,
        )
        tables = peers.allocate("tables", layout.table_bytes)
        self.exchange = RowExchange(layout, rank=peers.rank, tables=tables, programs=sms)
        self._loads = peers.allocate("loads", self.signals.table_bytes(topology.experts))
        # Reused, so that it holds loads of an earlier step if a rank is lost.
        self._gathered = torch.zeros(
            topology.ranks, topology.experts, dtype=torch.int32, device=peers.device
        )
        self._borrowers: list[str | None] = [None] * self.buffers
        self._gradients: dict[tuple[Any, ...], dict[str, GradientSlots]] = {}
        self._regions: dict[tuple[str, int], Region] = {}
        self._slot_tensors: dict[tuple[Layout, int], dict[str, torch.Tensor]] = {}
        self._read: set[str] = set()  # since the last barrier

    def share_loads(self, loads_E: torch.Tensor, digest: int) -> torch.Tensor:
        """Return [R, E] the loads of all ranks, whose digests must be equal."""
        if self.peers.size == 1:
            return loads_E[None]
        self.signals.share("loads", loads_E, self._loads, self._gathered, digest)
        self._read.clear()
        return self._gathered

    def barrier(self) -> None:
        """Make what every rank has written readable for all ranks."""
        self.signals.barrier("rows")
        self._read.clear()

    def prepare(self, tensors: Mapping[str, Stack], rows: torch.Tensor | None) -> None:
        """Allocate what layers with these weights and rows need; None: rows need no memory."""
        layout = Layout.of(tensors, self.streamer.homes)
        self.streamer.sources(layout, tensors)
        self.streamer.chunks_of_length(layout.nbytes)
        for buffer in range(self.buffers):
            self.slots(layout, buffer)
        self.gradient_slots(
            {name: (shape, accumulator(dtype)) for name, shape, dtype in layout.parts}
        )
        if rows is None:
            return
        row_bytes = rows.shape[-1] * rows.itemsize
        self.region("values", self.exchange.layout.value_bytes(row_bytes))
        self.region("served", self.exchange.layout.served_bytes(row_bytes))

    def region(self, name: str, nbytes: int) -> Region:
        """Return the memory of all ranks with this name and size."""
        region = self._regions.get((name, nbytes))
        return self._allocate(name, nbytes) if region is None else region

    @torch.inference_mode(False)
    def _allocate(self, name: str, nbytes: int) -> Region:
        if capturing(self.peers.device):
            raise LoadError(
                f"no memory is allocated for '{name} of {nbytes} bytes', and it cannot be "
                "allocated in a graph: run such a step before the capture, or call `prepare`"
            )
        with errors_at(f"the allocation of memory for {name!r}"):
            region = self.peers.allocate(f"{name} of {nbytes} bytes", nbytes)
        self._regions[name, nbytes] = region
        return region

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
        """Bytes of this rank in regions so far."""
        return sum(region.local.numel() for region in self._regions.values())

    def slots(self, layout: Layout, buffer: int) -> Region:
        """Return `[slots, bytes]` of every rank."""
        return self.region(f"slots {buffer}", max(1, self.topology.slots) * layout.nbytes)

    @torch.inference_mode(False)
    def slot_tensors(self, layout: Layout, buffer: int) -> dict[str, torch.Tensor]:
        """Return `[slots, ...]` the tensors in the slots of this rank."""
        tensors = self._slot_tensors.get((layout, buffer))
        if tensors is None:
            slots = self.topology.slots
            rows = self.slots(layout, buffer).local[: slots * layout.nbytes]
            tensors = layout.views(rows.view(slots, layout.nbytes))
            self._slot_tensors[layout, buffer] = tensors
        return dict(tensors)

    def gradient_slots(self, specs: TensorSpecs) -> dict[str, GradientSlots]:
        """Return memory for the gradients of replicas: blocks `[slots, ...]`, one per tensor."""
        if "gradients" in self._read:  # of the backward pass before
            self.barrier()
        slots, key = self.topology.slots, tuple(specs.items())
        if key not in self._gradients and slots:
            begins, end = [], 0
            for shape, dtype in specs.values():
                begins.append(end)
                end += aligned(slots * math.prod(shape) * dtype.itemsize)
            sizes = [size for name, size in self._regions if name == "gradients" and size > end]
            region = self.region("gradients", next(iter(sizes), end))
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
        self.signals.barrier("gradients")
        self._read = {"gradients"}
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
                f"{most} rows for rank {rank}, but its buffers are for {self.capacity}: "
                f"pass a larger capacity= (this happened {times} times; the outputs of those "
                "microbatches contain NaN)",
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
