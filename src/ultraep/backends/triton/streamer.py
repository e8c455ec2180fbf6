"""Launches of stages 3 and 8 on the GPU: weights into spare slots, gradients back to their homes.

Shapes: C replicas at most, H home experts, R ranks, P tensors of a bundle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton.language as tl

from ultraep.backends.triton.kernels import relay, schedule, stream
from ultraep.backends.triton.kernels.plan import Homes
from ultraep.backends.triton.launch import power_of_2, quick, require_resident
from ultraep.backends.triton.signals import MAX_CHUNKS, STAGES, Signals
from ultraep.bundle import Layout, Stack, tensors_of
from ultraep.comm import Region
from ultraep.errors import ConfigError
from ultraep.topology import Topology

MODES = {"direct": relay.DIRECT, "chain": relay.CHAIN, "auto": relay.AUTO}
SIGNAL_COST = 88 << 10  # bytes that a program moves in the latency of a signal
WORDS, WARPS = 8192, 4  # of a tile of weights
GRADIENTS, GRADIENT_WARPS = 4096, 8  # of a tile of gradients
# Factor for programs that have a multiprocessor to themselves and use all its threads.
LARGE = 4 if torch.version.hip is None else 2
MOST_SOURCES = 1024  # address tables in the cache


class Streamer:
    """Sends the weights of experts into the spare slots of other ranks, as the plan says.

    relay: "direct", "chain" or "auto".   programs: per rank; must be equal on all ranks.
    """

    def __init__(self, signals: Signals, topology: Topology, *, relay: str, programs: int) -> None:
        self.signals, self.topology, self.programs = signals, topology, programs
        self.mode = MODES[relay]
        device = signals.peers.device

        def table(values: object) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.int32, device=device)

        self.max_replicas = max(1, topology.ranks * topology.slots)
        self.homes = len(topology.home_experts(signals.peers.rank))
        self._home_tables = Homes(
            table(topology.home_of_expert.copy()),
            table(topology.home_slot_of_expert.copy()),
            table(topology.first_slot_of_rank.copy()),
            None,
        )
        self._chunks: dict[int, torch.Tensor] = {}
        self._sources: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._captured: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._scratch = torch.zeros(4 * self.max_replicas, dtype=torch.int32, device=device)

    @property
    def size(self) -> int:
        """Number of integers of a schedule."""
        return (
            int(schedule.HEADER.value)
            + 6 * self.max_replicas
            + self.topology.slots
            + 2 * self.homes
        )

    def schedule(self, replicas_C3: torch.Tensor, layout: Layout, schedule: torch.Tensor) -> None:
        """Write what this rank must send for a plan."""
        signals, topology = self.signals, self.topology
        padded = power_of_2(self.max_replicas)
        quick(relay.make_schedule)[(1,)](
            signals.region.addresses,
            replicas_C3,
            self._home_tables,
            self.chunks_of_length(layout.nbytes),
            schedule,
            self._scratch,
            signals.peers.rank,
            topology.ranks,
            topology.slots,
            self.homes,
            self.max_replicas,
            signals.channel_of_buffer(0),  # fills of all buffers are numbered together
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
        """Send what the schedule says, unless the slots still hold this very fill."""
        homes, parts = self.sources(layout, tensors)
        self.launch(homes, parts, schedule, layout.nbytes, rows, buffer, self.signals.peers.rank, 1)

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
        """Send for several ranks of this device; `homes` and `schedules` are by rank."""
        signals, topology = self.signals, self.topology
        require_resident(self.programs * ranks, WARPS, signals.peers.device)
        quick(stream.stream)[(self.programs * ranks,)](
            signals.region.addresses,
            rows.addresses,
            homes,
            parts,
            schedules,
            first_rank,
            topology.ranks,
            topology.slots,
            self.max_replicas,
            row_bytes,
            len(parts),
            homes.numel() // ranks,
            self.size,
            signals.channel_of_buffer(buffer),
            signals.released(buffer),
            signals.arrived(buffer),
            MAX_CHUNKS,
            STAGES.index("weights"),
            signals.poll_limit,
            W=WORDS,
            PROGRAMS=self.programs,
            num_warps=WARPS,
        )

    def sources(
        self, layout: Layout, tensors: Mapping[str, Stack]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[H, P] addresses of the tensors of home experts; [P, 3] offset, bytes and alignment.

        The tables are cached by address; tables that a graph has captured are never dropped.
        """
        places = tuple(pointers(name, tensors[name]) for name, _, _ in layout.parts)
        key, capturing = (layout, places), self._capturing()
        known = self._captured.get(key) or self._sources.pop(key, None)
        if known is None and capturing:
            raise ConfigError(
                "a graph capture uses weights that no step has used before; run one step first"
            )
        tables = known or self._table(layout, tensors)
        (self._captured if capturing else self._sources)[key] = tables
        if len(self._sources) > MOST_SOURCES:
            self._sources.pop(next(iter(self._sources)))
        return tables

    def _table(
        self, layout: Layout, tensors: Mapping[str, Stack]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device, parts = self.signals.peers.device, []
        columns = [addresses(tensors[name]) for name, _, _ in layout.parts]
        for (begin, end), column in zip(layout.spans.values(), columns, strict=True):
            aligned = (end - begin) % 16 == 0 and all(pointer % 16 == 0 for pointer in column)
            parts.append([begin, end - begin, int(aligned)])
        homes = torch.tensor(columns, dtype=torch.int64).T.contiguous()
        return homes.to(device), torch.tensor(parts, dtype=torch.int64, device=device)

    def _capturing(self) -> bool:
        cuda = self.signals.peers.device.type == "cuda"
        return cuda and torch.cuda.is_current_stream_capturing()

    def chunks_of_length(self, nbytes: int) -> torch.Tensor:
        """[longest + 1] chunks of an expert of that size, by the longest chain."""
        if nbytes not in self._chunks:
            longest = min(self.max_replicas, self.topology.domain_size)
            chunks = [chunks_for(length, nbytes, self.programs) for length in range(longest + 1)]
            device = self.signals.peers.device
            self._chunks[nbytes] = torch.tensor(chunks, dtype=torch.int32, device=device)
        return self._chunks[nbytes]


def chunks_for(length: int, nbytes: int, programs: int) -> int:
    """Return the number of chunks of an expert in a chain of `length` hops.

    n chunks take n + length - 1 rounds of nbytes / n bytes and one signal each: least at the root.
    """
    if length < 2:
        return 1
    best = math.isqrt((length - 1) * nbytes // (programs * SIGNAL_COST))
    return min(MAX_CHUNKS, max(2, best))


def pointers(name: str, stack: Stack) -> tuple[int, ...]:
    """Return the addresses that identify the tensors of the home experts, and their distance."""
    distance = 0
    for tensor in tensors_of(stack):
        expert = tensor
        if isinstance(stack, torch.Tensor):
            expert, distance = tensor[:1], tensor.stride(0)
        if not expert.is_contiguous():
            raise ConfigError(
                f"{name!r} must be contiguous, got shape {list(tensor.shape)} and strides "
                f"{list(tensor.stride())}; call .contiguous()"
            )
    return distance, *(tensor.data_ptr() for tensor in tensors_of(stack))


def addresses(stack: Stack) -> list[int]:
    """[H] the address of the tensor of every home expert."""
    if not isinstance(stack, torch.Tensor):
        return [tensor.data_ptr() for tensor in stack]
    step = stack.stride(0) * stack.itemsize if stack.ndim else 0
    return [stack.data_ptr() + index * step for index in range(len(stack))]


def pull(
    gradients_HP: torch.Tensor,
    rows: Region,
    schedule: torch.Tensor,
    streamer: Streamer,
    *,
    programs: int,
    large: bool = False,
    own_HP: torch.Tensor | None = None,
) -> None:
    """Add the gradients of replicas to the gradients of their home experts.

    own_HP: gradients of the home experts; None: `gradients_HP`.
    rows: `[slots, P]` of every rank, in the same dtype.
    large: a program has a multiprocessor to itself.
    """
    own = gradients_HP if own_HP is None else own_HP
    assert own.stride() == gradients_HP.stride(), (own.stride(), gradients_HP.stride())
    double = own.dtype == torch.float64
    size = LARGE if large and not double else 1
    quick(stream.pull)[(programs,)](
        gradients_HP,
        own,
        rows.addresses,
        schedule,
        streamer.topology.slots,
        streamer.max_replicas,
        len(gradients_HP),
        gradients_HP.shape[1],
        gradients_HP.stride(0),
        ACCUMULATOR=tl.float64 if double else tl.float32,
        ALIGNED=own.shape[1] * own.element_size() % 16 == 0,
        W=GRADIENTS * size,
        PROGRAMS=programs,
        num_warps=GRADIENT_WARPS * size,
    )
