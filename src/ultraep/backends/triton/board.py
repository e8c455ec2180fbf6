"""The board on which ranks leave each other words: epochs, flags, and what went wrong.

Shapes: R ranks.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from ultraep.backends.triton.device import interpreted
from ultraep.backends.triton.kernels import signals
from ultraep.backends.triton.launch import power_of_2, quick, require_resident
from ultraep.comm import Peers, Region
from ultraep.errors import CommunicationError, PlanMismatch

STAGES = ("loads", "rows", "weights", "gradients")  # what a rank can wait for
UNLIKE = len(STAGES)  # in place of a stage: ranks met that are of different kinds
MEETINGS = ("loads", "rows", "gradients")
MAX_CHUNKS = 64
AS_PROMISED = -1  # in place of a version
WORD = 4


class Told(NamedTuple):
    """What ranks tell each other of their weights: a number, which is 0 where nothing is promised.

    version: of this rank; AS_PROMISED: the number that stands at `promise` when the kernel runs.
    versions: [R] where to put those of all ranks.
    """

    version: int
    promise: torch.Tensor
    versions: torch.Tensor


class Board:
    """Words of all ranks: a channel for every meeting and for every buffer of spare slots.

    timeout: seconds after which a rank that waits gives up, and names whom it waited for.
    """

    def __init__(self, peers: Peers, *, slots: int, buffers: int, timeout: float) -> None:
        self.peers, self.slots, self.timeout = peers, slots, timeout
        channels = len(MEETINGS) + buffers
        self._flags = self.channel(channels)
        self._of_buffers = self._flags + len(MEETINGS) * peers.size
        self._per_buffer = peers.size * slots + slots * MAX_CHUNKS
        words = self._of_buffers + buffers * self._per_buffer
        self.region = peers.allocate("board", words * WORD)
        self.words = self.region.local.view(torch.int32)
        polls = int(timeout * polls_per_second(peers.device))
        self.patience = min(max(1, polls), 2**31 - 1)  # kernels count in 32 bits
        self._no_table = peers.allocate("meetings", self.table_bytes(0))
        self._nothing = torch.zeros(peers.size, dtype=torch.int32, device=peers.device)
        self._told_nothing = Told(0, self._nothing, self._nothing)

    def channel(self, index: int) -> int:
        """Word at which a channel begins: meetings first, then buffers."""
        return int(signals.CHANNEL.value + index * signals.WORDS.value)

    def channel_of_buffer(self, buffer: int) -> int:
        return self.channel(len(MEETINGS) + buffer)

    def released(self, buffer: int) -> int:
        """Word of the first of `R * slots` flags: a slot of that rank is free."""
        return self._of_buffers + buffer * self._per_buffer

    def arrived(self, buffer: int) -> int:
        """Word of the first of `slots * MAX_CHUNKS` counts: programs that brought the chunk."""
        return self.released(buffer) + self.peers.size * self.slots

    def share(
        self,
        meeting: str,
        row: torch.Tensor,
        tables: Region,
        gathered: torch.Tensor,
        kind: int = 0,
        told: Told | None = None,
    ) -> None:
        """All ranks meet and swap rows of int32: `gathered` is `[R, ...]` of them.

        tables: `table_bytes` of every rank.   kind: a number that all must have alike.
        """
        self._share(meeting, row, tables, gathered, row.numel(), kind, told or self._told_nothing)

    def table_bytes(self, numbers: int) -> int:
        """Memory through which rows of so many numbers are swapped."""
        return 2 * self.peers.size * (numbers + 2) * WORD

    def meet(self, meeting: str) -> None:
        """All ranks meet: what each wrote before, all can read afterwards."""
        if self.peers.size > 1:
            nothing, told = self._nothing, self._told_nothing
            self._share(meeting, nothing, self._no_table, nothing, 0, 0, told)

    def _share(
        self,
        meeting: str,
        row: torch.Tensor,
        tables: Region,
        gathered: torch.Tensor,
        numbers: int,
        kind: int,
        told: Told,
    ) -> None:
        index, ranks = MEETINGS.index(meeting), self.peers.size
        require_resident(ranks, 1, self.peers.device)
        quick(signals.share)[(ranks,)](
            self.region.addresses,
            tables.addresses,
            row,
            gathered,
            told.promise,
            told.versions,
            self.peers.rank,
            ranks,
            self.channel(index),
            self._flags + index * ranks,
            numbers,
            kind,
            told.version,
            STAGES.index(meeting),
            UNLIKE,
            self.patience,
            B=min(1024, max(32, power_of_2(numbers))),
            num_warps=1,
        )

    @property
    def sent(self) -> int:
        """Copies that this rank was to send so far, also by graphs; waits for the device."""
        return int(self.words[signals.SENT.value])

    def check(self) -> None:
        """Raise if a rank did not come in time; waits for the device."""
        fault = int(self.words[signals.FAULT.value])
        if fault:
            stage, peer = divmod(fault - 1, signals.RANKS.value)
            if stage == UNLIKE:
                raise PlanMismatch(
                    f"ranks disagree about the weights or inputs: rank {peer} has others than "
                    f"another rank (seen on rank {self.peers.rank}); make the group anew"
                )
            raise CommunicationError(
                f"rank {peer} did not come within {self.timeout:g} s: a rank waited for it "
                f"at stage {STAGES[stage]!r} (seen on rank {self.peers.rank}); make the group anew"
            )


def polls_per_second(device: torch.device) -> float:
    """How often a program looks at a word in a second; measured, since timers are not portable.

    The most of some tries: a device that was idle is slow at first.
    """
    word = torch.zeros(1, dtype=torch.int32, device=device)
    polls = 100 if interpreted() else 50_000
    rates = []
    for _ in range(2 if interpreted() else 4):  # the first one compiles
        _finish(device)
        begin = time.perf_counter()
        quick(signals.idle)[(1,)](word, polls, num_warps=1)
        _finish(device)
        rates.append(polls / (time.perf_counter() - begin))
    return max(rates)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
