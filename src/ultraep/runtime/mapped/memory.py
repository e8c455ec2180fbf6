"""MappedMemory: memory that ranks share, and what moves through it: weights, rows, gradients.

Every verb launches kernels and returns at once. A region is written only after all ranks have read
what stood there: each meeting of the ranks says so for everything that was read before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ultraep.backends.triton.exchange import RegionLayout, RowExchange, aligned
from ultraep.backends.triton.launch import multiprocessors
from ultraep.backends.triton.signals import Signals, WeightVersion
from ultraep.backends.triton.streamer import Contents, Streamer, pull
from ultraep.bundle import Layout
from ultraep.comm import Peers, Region
from ultraep.errors import LoadError, SlotError
from ultraep.microbatch import Kinds
from ultraep.runtime.mapped.peers import NamedPeers
from ultraep.runtime.settings import DeviceShare
from ultraep.runtime.streams import Overlap, capturing
from ultraep.topology import Topology

WHOLE = 64  # multiprocessors from which on some of them can be spared
SHARE = 16  # one in so many


class MappedMemory:
    """The shared memory of one rank. Regions are allocated at their first use, by all ranks.

    name: of all its regions, which are apart from those of other such memories.
    """

    def __init__(
        self,
        peers: Peers,
        topology: Topology,
        *,
        name: str,
        tokens: int,
        top_k: int,
        capacity: int,
        relay: str,
        buffers: int,
        timeout: float,
        share: DeviceShare,
    ) -> None:
        own: Peers = NamedPeers(peers, name)
        self.peers, self.topology, self.capacity = own, topology, capacity
        self.tokens, self.top_k = tokens, top_k
        self.sms = share.sms or multiprocessors(own.device)
        self.overlap = Overlap(own.device, share.stream)
        self.board = Signals(own, slots=topology.slots, buffers=buffers, timeout=timeout)
        moving, self._pulling, self.beside = _programs(own.device, self.sms, share.budget)
        self.streamer = Streamer(self.board, topology, relay=relay, programs=moving)
        layout = RegionLayout(
            first_slot_of_rank=topology.first_slot_of_rank,
            tokens=tokens,
            top_k=top_k,
            capacity=capacity,
        )
        tables = own.allocate("tables", layout.table_bytes)
        self.exchange = RowExchange(layout, rank=own.rank, tables=tables, programs=self.sms)
        self._loads = own.allocate("loads", self.board.table_bytes(topology.experts))
        # Kept, not made anew: if a rank is lost, it holds loads of a step before, and no nonsense.
        self._gathered = torch.zeros(
            topology.ranks, topology.experts, dtype=torch.int32, device=own.device
        )
        self.buffers = buffers
        self._borrowers: list[str | None] = [None] * buffers
        self._layers: list[int | None] = [None] * buffers  # that had them last
        self._lent_at, self._loans = [0] * buffers, 0
        self._contents: dict[tuple[int, int], torch.Tensor] = {}
        self._owners: dict[tuple[int, Layout], int] = {}
        self._gradients: dict[tuple[Any, ...], dict[str, GradientSlots]] = {}
        self._regions: dict[tuple[str, int], Region] = {}
        self._held: dict[tuple[Layout, int], dict[str, torch.Tensor]] = {}
        self._read: set[str] = set()  # since the last meeting

    def share_loads(self, loads_E: torch.Tensor, kind: int, told: WeightVersion) -> torch.Tensor:
        """[R, E] the loads of all ranks, from those of this one; all must be of one kind.

        told: of the weights of this rank, and of all.
        """
        if self.peers.size == 1:
            return loads_E[None]
        self.board.share("loads", loads_E, self._loads, self._gathered, kind, told)
        self._read.clear()
        return self._gathered

    def meet(self) -> None:
        """What every rank has written, all can read afterwards."""
        self.board.barrier("rows")
        self._read.clear()

    def region(self, kind: str, nbytes: int) -> Region:
        """The memory of that kind and size, of all ranks."""
        found = self._regions.get((kind, nbytes))
        return self._allocate(kind, nbytes) if found is None else found

    def _at_least(self, kind: str, nbytes: int) -> Region:
        """Memory of that kind that is large enough, of all ranks."""
        large = (held for (of, size), held in self._regions.items() if of == kind and size > nbytes)
        return next(large, None) or self.region(kind, nbytes)

    @torch.inference_mode(False)
    def _allocate(self, kind: str, nbytes: int) -> Region:
        name = f"{kind} of {nbytes} bytes"
        if capturing(self.peers.device):
            raise LoadError(
                f"there is no memory for {name!r} yet, and it cannot be taken in a graph: run "
                "such a step before, outside of a graph, or `prepare`"
            )
        region = self._regions[kind, nbytes] = self.peers.allocate(name, nbytes)
        return region

    def to_write(self, kind: str, nbytes: int) -> Region:
        """That memory, when nobody reads it any more."""
        if kind in self._read:
            self.meet()
        return self.region(kind, nbytes)

    def to_read(self, kind: str, nbytes: int) -> Region:
        """That memory, to be read until the next meeting."""
        self._read.add(kind)
        return self.region(kind, nbytes)

    @contextmanager
    def lend(self, borrower: str, layer: int, before: int | None) -> Iterator[int]:
        """The number of a free buffer of spare slots; all ranks take the same.

        before: the one that is preferred, then the layer's last one, then one that nobody had yet,
        then the one that was lent longest ago.
        """
        if None not in self._borrowers:
            raise SlotError(
                f"{borrower} needs spare slots, all {len(self._borrowers)} are lent to "
                f"{', '.join(map(str, self._borrowers))}: let it finish, or give in_flight="
            )
        layers, lent_at = self._layers, self._lent_at
        free = [number for number, other in enumerate(self._borrowers) if other is None]
        buffer = max(
            free,
            key=lambda n: (n == before, layers[n] == layer, layers[n] is None, -lent_at[n]),
        )
        self._loans += 1
        self._borrowers[buffer], layers[buffer], lent_at[buffer] = borrower, layer, self._loans
        try:
            yield buffer
        finally:
            self._borrowers[buffer] = None

    @property
    def nbytes(self) -> int:
        """Memory of this rank in regions so far."""
        return sum(region.local.numel() for region in self._regions.values())

    def slots(self, layout: Layout, buffer: int) -> Region:
        """`[slots, bytes]` of every rank."""
        return self.region(f"slots {buffer}", max(1, self.topology.slots) * layout.nbytes)

    @torch.inference_mode(False)
    def held_by_all(self, layout: Layout, buffer: int) -> torch.Tensor:
        """[R * slots, 3] what the slots of this region hold on all ranks, as all know it."""
        key = (self.slots(layout, buffer).local.numel(), buffer)
        if key not in self._contents:
            self._contents[key] = self.streamer.empty_slots()
        return self._contents[key]

    def contents(self, layout: Layout, buffer: int, layer: int, versions: torch.Tensor) -> Contents:
        """That, for weights of a layer in these versions."""
        owner = self._owners.setdefault((layer, layout), len(self._owners) + 1)
        return Contents(self.held_by_all(layout, buffer), versions, owner, buffer)

    @torch.inference_mode(False)
    def held(self, layout: Layout, buffer: int) -> dict[str, torch.Tensor]:
        """`[slots, ...]` the tensors in the slots of this rank."""
        found = self._held.get((layout, buffer))
        if found is None:
            slots = self.topology.slots
            rows = self.slots(layout, buffer).local[: slots * layout.nbytes]
            found = layout.views(rows.view(slots, layout.nbytes))
            self._held[layout, buffer] = found
        return dict(found)

    def gradient_slots(self, kinds: Kinds) -> dict[str, GradientSlots]:
        """Memory for the gradients of copies, one block `[slots, ...]` after the other."""
        self._free_gradients()
        slots, key = self.topology.slots, tuple(kinds.items())
        if key not in self._gradients and slots:
            begins, end = [], 0
            for shape, dtype in kinds.values():
                begins.append(end)
                end += aligned(slots * math.prod(shape) * dtype.itemsize)
            region = self._at_least("gradients", end)
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
        """The gradients of home experts, from their own and those of all copies.

        To be joined before the next meeting of rows, which frees the memory of the copies.
        beside: aside, by a few large programs: products leave no room on a multiprocessor, so those
        that these take must be left to them.
        """
        self.board.barrier("gradients")
        self._read = {"gradients"}
        with self.overlap.aside() if beside else nullcontext():
            for name, of_copies in slots.items():
                pull(
                    _flat(homes[name]),
                    of_copies.region,
                    schedule,
                    self.streamer,
                    programs=self.beside if beside else self._pulling,
                    large=beside,
                    own_HP=_flat(own[name]),
                )

    def _free_gradients(self) -> None:
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


def _programs(device: torch.device, sms: int, budget: int | None) -> tuple[int, int, int]:
    """Those that move weights, that pull gradients, and that do so beside a product.

    Programs of a relay wait for each other, so all must fit on the device at once: two on a
    multiprocessor do, with room for others. Those that only pull may queue.
    """
    if device.type == "cpu":
        return 1, 2, 1
    return 2 * (budget or sms), 4 * sms, sms // SHARE if sms >= WHOLE else 0


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """[H, P] from `[H, ...]`."""
    return tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None]


class GradientSlots:
    """Memory of all ranks for the gradients of their copies of one tensor."""

    def __init__(
        self, region: Region, begin: int, slots: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.nbytes = math.prod(shape) * dtype.itemsize  # of a copy
        held = region.local[begin : begin + slots * self.nbytes]
        self.local = held.view(dtype).view(slots, *shape)  # of this rank
        self.region = Region(held, region.addresses + begin, region)
