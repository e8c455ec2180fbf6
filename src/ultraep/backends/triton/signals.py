"""Signals between ranks on the device: epochs, flags and faults.

Shapes: R ranks.
"""

from __future__ import annotations

import time

import torch

from ultraep.backends.triton.device import interpreted
from ultraep.backends.triton.kernels import signals
from ultraep.backends.triton.launch import power_of_2, quick, require_resident
from ultraep.comm import Peers, Region
from ultraep.errors import CommunicationError, PlanMismatch

STAGES = ("loads", "rows", "weights", "gradients")  # in which a rank can wait
MISMATCH = len(STAGES)  # instead of a stage: ranks with different digests reached a barrier
BARRIERS = ("loads", "rows", "gradients")
MAX_CHUNKS = 64
WORD = 4


class Signals:
    """Signal words of all ranks: one channel per barrier and per buffer of spare slots.

    timeout: seconds after which a waiting rank gives up and names the rank it waited for.
    first_rank: number of rank 0 in errors.
    """

    def __init__(
        self, peers: Peers, *, slots: int, buffers: int, timeout: float, first_rank: int = 0
    ) -> None:
        self.peers, self.slots, self.timeout = peers, slots, timeout
        self._first_rank = first_rank
        channels = len(BARRIERS) + buffers
        self._flags = self.channel(channels)
        self._of_buffers = self._flags + len(BARRIERS) * peers.size
        self._per_buffer = peers.size * slots + slots * MAX_CHUNKS
        words = self._of_buffers + buffers * self._per_buffer
        self.region = peers.allocate("signals", words * WORD)
        self.words = self.region.local.view(torch.int32)
        polls = int(timeout * polls_per_second(peers.device))
        self.poll_limit = min(max(1, polls), 2**31 - 1)  # kernels count in 32 bits
        self._no_table = peers.allocate("barriers", self.table_bytes(0))
        self._no_row = torch.zeros(0, dtype=torch.int32, device=peers.device)

    def channel(self, index: int) -> int:
        """Return the first word of a channel: barriers first, then buffers."""
        return int(signals.CHANNEL.value + index * signals.WORDS.value)

    def channel_of_buffer(self, buffer: int) -> int:
        return self.channel(len(BARRIERS) + buffer)

    def released(self, buffer: int) -> int:
        """Return the word of the first of `R * slots` flags: the slot is free."""
        return self._of_buffers + buffer * self._per_buffer

    def arrived(self, buffer: int) -> int:
        """Return the word of the first of `slots * MAX_CHUNKS` counters of chunks."""
        return self.released(buffer) + self.peers.size * self.slots

    def share(
        self,
        barrier: str,
        row: torch.Tensor,
        tables: Region,
        gathered: torch.Tensor,
        digest: int = 0,
    ) -> None:
        """Gather a row of int32 from every rank into `gathered` [R, ...]. A barrier.

        tables: `table_bytes` of every rank.   digest: must be equal on all ranks.
        """
        index, ranks, numbers = BARRIERS.index(barrier), self.peers.size, row.numel()
        require_resident(ranks, 1, self.peers.device)
        quick(signals.share)[(ranks,)](
            self.region.addresses,
            tables.addresses,
            row,
            gathered,
            self.peers.rank,
            ranks,
            self.channel(index),
            self._flags + index * ranks,
            numbers,
            digest,
            STAGES.index(barrier),
            MISMATCH,
            self.poll_limit,
            B=min(1024, max(32, power_of_2(numbers))),
            num_warps=1,
        )

    def table_bytes(self, numbers: int) -> int:
        """Return the bytes that `share` needs for rows of `numbers` integers."""
        return 2 * self.peers.size * (numbers + 1) * WORD

    def barrier(self, name: str) -> None:
        """Wait for all ranks: what a rank wrote before, all ranks can read afterwards."""
        if self.peers.size > 1:
            self.share(name, self._no_row, self._no_table, self._no_row)

    def check(self) -> None:
        """Raise if a rank did not signal in time; waits for the device."""
        fault = int(self.words[signals.FAULT.value])
        if fault:
            stage, peer = divmod(fault - 1, signals.RANKS.value)
            peer, own = peer + self._first_rank, self.peers.rank + self._first_rank
            if stage == MISMATCH:
                raise PlanMismatch(
                    f"ranks disagree about the weights or inputs: rank {peer} differs "
                    f"(detected by rank {own}); create the group again",
                    ranks=[peer],
                )
            place = f"stage {STAGES[stage]!r}"
            raise CommunicationError(
                f"rank {peer} did not arrive within {self.timeout:g} s at {place} "
                f"(detected by rank {own}); create the group again",
                ranks=[peer],
                place=place,
            )


def polls_per_second(device: torch.device) -> float:
    """Measure how often a program polls a word per second; GPU timers are not portable.

    Returns the best of several tries: an idle device is slow at first.
    """
    word = torch.zeros(1, dtype=torch.int32, device=device)
    polls = 100 if interpreted() else 50_000
    rates = []
    for _ in range(2 if interpreted() else 4):  # the first try compiles
        _finish(device)
        begin = time.perf_counter()
        quick(signals.idle)[(1,)](word, polls, num_warps=1)
        _finish(device)
        rates.append(polls / (time.perf_counter() - begin))
    return max(rates)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
