"""Launches of stage 3 on the GPU: a plan on the device in, filled spare slots out.

Shapes: C copies at most, H home experts, R ranks, P tensors of a bundle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ultraep.backends.triton.board import MAX_CHUNKS, STAGES, Board
from ultraep.backends.triton.kernels import relay, schedule, stream
from ultraep.backends.triton.launch import power_of_2, quick, require_resident
from ultraep.bundle import Layout, Stack, tensors_of
from ultraep.comm import Region
from ultraep.errors import ConfigError
from ultraep.topology import Topology

MODES = {"direct": relay.DIRECT, "chain": relay.CHAIN, "auto": relay.AUTO}
SIGNAL_COST = 88 << 10  # bytes that a program could move while a signal travels
WORDS, WARPS = 8192, 4  # of a tile
MOST_SOURCES = 1024  # tables of addresses that are kept


class Contents(NamedTuple):
    """What the slots of one buffer hold on all ranks, and what is to be there of one microbatch.

    held: [R * slots, 3] owner, expert and version of what every slot holds; versions above 0 only.
    versions: [R] of the weights of all ranks; 0: not promised, so that they are sent again.
    owner: a number of the layer and the kind of its weights.   buffer: of slots.
    """

    held: torch.Tensor
    versions: torch.Tensor
    owner: int = 1
    buffer: int = 0


class Streamer:
    """Sends the weights of experts into the spare slots of others, as the plan says.

    relay: "direct", "chain" or "auto".   programs: how much of the device may work at it; alike
    on all ranks.
    """

    def __init__(self, board: Board, topology: Topology, *, relay: str, programs: int) -> None:
        if programs < 1:
            raise ConfigError(f"programs must be at least 1, got {programs}")
        self.board, self.topology, self.programs = board, topology, programs
        self.mode = MODES[relay]
        device = board.peers.device

        def table(values: object) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.int32, device=device)

        self.copies = max(1, topology.ranks * topology.slots)
        self.homes = len(topology.home_experts(board.peers.rank))
        self._home_of_expert = table(topology.home_of_expert.copy())
        self._home_slot_of_expert = table(topology.home_slot_of_expert.copy())
        self._first_slot_of_rank = table(topology.first_slot_of_rank.copy())
        self._chunks: dict[int, torch.Tensor] = {}
        self._sources: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._captured: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._scratch = torch.zeros(7 * self.copies, dtype=torch.int32, device=device)
        self._anything = Contents(
            self.empty_slots(), torch.zeros(topology.ranks, dtype=torch.int32, device=device)
        )

    def empty_slots(self) -> torch.Tensor:
        """[R * slots, 3] what `Contents` say of slots that hold nothing."""
        return torch.zeros(self.copies, 3, dtype=torch.int32, device=self.board.peers.device)

    @property
    def size(self) -> int:
        """Numbers of a schedule."""
        return int(schedule.HEADER.value) + 6 * self.copies + self.topology.slots + 2 * self.homes

    def schedule(
        self,
        replicas_C3: torch.Tensor,
        layout: Layout,
        schedule: torch.Tensor,
        contents: Contents | None = None,
        *,
        again: bool = False,
    ) -> None:
        """What this rank has to do for a plan, into `schedule`; to be carried out before the next.

        contents: of the slots, which hold the copies of the plan afterwards; None: anything.
        again: the schedule was carried out before, and others may have filled the slots since.
        """
        held, versions, owner, buffer = contents or self._anything
        board, topology = self.board, self.topology
        padded = power_of_2(self.copies)
        quick(relay.make_schedule)[(1,)](
            board.region.addresses,
            replicas_C3,
            self._home_of_expert,
            self._home_slot_of_expert,
            self._first_slot_of_rank,
            self.chunks_of_length(layout.nbytes),
            versions,
            held,
            schedule,
            self._scratch,
            owner,
            int(again),
            board.peers.rank,
            topology.ranks,
            topology.slots,
            self.homes,
            self.copies,
            board.channel_of_buffer(0),  # fills of all buffers are numbered together
            board.channel_of_buffer(buffer),
            MODE=self.mode,
            C=padded,
            B=max(1, min(32, padded, 8192 // padded)),
            H=power_of_2(max(1, self.homes)),
            num_warps=4,
        )

    def fill(
        self,
        schedule: torch.Tensor,
        layout: Layout,
        tensors: Mapping[str, Stack],
        rows: Region,
        buffer: int = 0,
    ) -> None:
        """Send what the schedule says, unless the slots hold it already."""
        homes, parts = self.sources(layout, tensors)
        self.launch(homes, parts, schedule, layout.nbytes, rows, buffer, self.board.peers.rank, 1)

    def launch(
        self,
        homes: torch.Tensor,
        parts: torch.Tensor,
        schedules: torch.Tensor,
        row_bytes: int,
        rows: Region,
        buffer: int,
        first_rank: int,
        ranks: int,
    ) -> None:
        """Send for several ranks of this device at once; `homes` and `schedules` by rank."""
        board, topology = self.board, self.topology
        require_resident(self.programs * ranks, WARPS, board.peers.device)
        quick(stream.stream)[(self.programs * ranks,)](
            board.region.addresses,
            rows.addresses,
            homes,
            parts,
            schedules,
            first_rank,
            topology.ranks,
            topology.slots,
            self.copies,
            row_bytes,
            len(parts),
            homes.numel() // ranks,
            self.size,
            board.channel_of_buffer(buffer),
            board.released(buffer),
            board.arrived(buffer),
            MAX_CHUNKS,
            STAGES.index("weights"),
            board.patience,
            W=WORDS,
            PROGRAMS=self.programs,
            num_warps=WARPS,
        )

    def sources(
        self, layout: Layout, tensors: Mapping[str, Stack]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[H, P] where the tensors of home experts begin; [P, 3] place in a row, bytes, alignment.

        Kept for weights that stay where they are; those that a graph has seen are kept for good.
        """
        places = tuple(place_of(name, tensors[name]) for name, _, _ in layout.parts)
        key, capturing = (layout, places), self._capturing()
        known = self._captured.get(key) or self._sources.pop(key, None)
        if known is None and capturing:
            raise ConfigError("a graph is captured, and no step was run with these weights before")
        found = known or self._table(layout, tensors)
        (self._captured if capturing else self._sources)[key] = found
        if len(self._sources) > MOST_SOURCES:
            self._sources.pop(next(iter(self._sources)))
        return found

    def _table(
        self, layout: Layout, tensors: Mapping[str, Stack]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device, parts = self.board.peers.device, []
        columns = [addresses(tensors[name]) for name, _, _ in layout.parts]
        for (begin, end), column in zip(layout.spans.values(), columns, strict=True):
            aligned = (end - begin) % 16 == 0 and all(pointer % 16 == 0 for pointer in column)
            parts.append([begin, end - begin, int(aligned)])
        homes = torch.tensor(columns, dtype=torch.int64).T.contiguous()
        return homes.to(device), torch.tensor(parts, dtype=torch.int64, device=device)

    def _capturing(self) -> bool:
        cuda = self.board.peers.device.type == "cuda"
        return cuda and torch.cuda.is_current_stream_capturing()

    def chunks_of_length(self, nbytes: int) -> torch.Tensor:
        """Chunks of an expert of so many bytes, by the longest chain."""
        if nbytes not in self._chunks:
            longest = min(self.copies, self.topology.domain_size)
            chunks = [chunks_for(length, nbytes, self.programs) for length in range(longest + 1)]
            device = self.board.peers.device
            self._chunks[nbytes] = torch.tensor(chunks, dtype=torch.int32, device=device)
        return self._chunks[nbytes]


def chunks_for(length: int, nbytes: int, programs: int) -> int:
    """Chunks of an expert in a chain of so many hops.

    n chunks take n + length - 1 rounds, of nbytes / n bytes and one signal each: least at the root.
    """
    if length < 2:
        return 1
    best = math.isqrt((length - 1) * nbytes // (programs * SIGNAL_COST))
    return min(MAX_CHUNKS, max(2, best))


def place_of(name: str, stack: Stack) -> tuple[int, ...]:
    """What tells where the tensors of the home experts begin."""
    for tensor in tensors_of(stack):
        if not tensor.is_contiguous():
            raise ConfigError(
                f"{name!r} must be contiguous: shape {list(tensor.shape)}, "
                f"strides {list(tensor.stride())}"
            )
    return tuple(tensor.data_ptr() for tensor in tensors_of(stack))


def addresses(stack: Stack) -> list[int]:
    """[H] where the tensor of every home expert begins."""
    if not isinstance(stack, torch.Tensor):
        return [tensor.data_ptr() for tensor in stack]
    step = stack.stride(0) * stack.itemsize if stack.ndim else 0
    return [stack.data_ptr() + index * step for index in range(len(stack))]
