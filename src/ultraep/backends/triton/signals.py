"""Signals between ranks on the device: epochs, flags and faults.

Shapes: R ranks.
"""

from __future__ import annotations

import time

import torch

from ultraep.backends.triton.device import interpreted
from ultraep.backends.triton.kernels import signals
from ultraep.backends.triton.launch import OPEN, Bound, power_of_2, quick, require_resident
from ultraep.comm import Peers
from ultraep.errors import CommunicationError, PlanMismatch
from ultraep.position import Position, compare_positions

STAGES = ("loads", "rows", "weights", "gradients")  # in which a rank can wait
MISMATCH = len(STAGES)  # instead of a stage: ranks at different positions reached a barrier
MAX_CHUNKS = 64
WORD = 4
NOWHERE = (0, 0, 0)


class Signals:
    """Signal words of all ranks: one channel for all barriers, and one per buffer of spare slots.

    A rank that waits at another barrier than the others is therefore a fault at once.
    numbers: the most that `share` gathers.
    positions: [R + 1, 3] memory for point, step and digest of all ranks at the last barrier, then
        the fault of this rank.
    timeout: seconds after which a waiting rank gives up and names the rank it waited for.
    first_rank: number of rank 0 in errors.
    """

    def __init__(
        self,
        peers: Peers,
        *,
        slots: int,
        buffers: int,
        timeout: float,
        numbers: int = 0,
        positions: torch.Tensor | None = None,
        first_rank: int = 0,
    ) -> None:
        self.peers, self.slots, self.timeout = peers, slots, timeout
        self._first_rank = first_rank
        self._flags = self.channel(1 + buffers)
        self._of_buffers = self._flags + peers.size
        self._per_buffer = peers.size * slots + slots * MAX_CHUNKS
        words = self._of_buffers + buffers * self._per_buffer
        self.region = peers.allocate("signals", words * WORD)
        self.words = self.region.local.view(torch.int32)
        polls = int(timeout * polls_per_second(peers.device))
        self.poll_limit = min(max(1, polls), 2**31 - 1)  # kernels count in 32 bits
        stride = int(signals.POSITION.value) + numbers
        self._tables = peers.allocate("tables of signals", 2 * peers.size * stride * WORD)
        if positions is None:
            positions = torch.zeros(peers.size + 1, 3, dtype=torch.int32, device=peers.device)
        self.positions, self._nothing = positions, positions[:0]
        addresses = self.region.addresses, self._tables.addresses
        places = self.channel(0), self._flags
        require_resident(peers.size, 1, peers.device)
        self._share = Bound(
            signals.share,
            *(*addresses, OPEN, OPEN, positions, peers.rank, peers.size, *places, OPEN, stride),
            *(OPEN, OPEN, OPEN, OPEN, OPEN, OPEN),
            B=min(1024, max(32, power_of_2(numbers))),
            num_warps=1,
        )

    def channel(self, index: int) -> int:
        """Return the first word of a channel: the barriers', then one of each buffer."""
        return int(signals.CHANNEL.value + index * signals.WORDS.value)

    def channel_of_buffer(self, buffer: int) -> int:
        return self.channel(1 + buffer)

    def released(self, buffer: int) -> int:
        """Return the word of the first of `R * slots` flags: the slot is free."""
        return self._of_buffers + buffer * self._per_buffer

    def arrived(self, buffer: int) -> int:
        """Return the word of the first of `slots * MAX_CHUNKS` counters of chunks."""
        return self.released(buffer) + self.peers.size * self.slots

    def share(
        self,
        row: torch.Tensor,
        gathered: torch.Tensor,
        position: tuple[int, int, int] = NOWHERE,
        stage: str = "loads",
        *,
        compared: bool = False,
    ) -> None:
        """Gather a row of int32 from every rank into `gathered` [R, ...]. A barrier.

        position: point, step and digest, which must be equal on all ranks.
        compared: the host compares positions, so that a difference is not a fault of the device.
        """
        mismatch = -1 if compared else MISMATCH
        words = row.numel(), *position, STAGES.index(stage), mismatch, self.poll_limit
        self._share((self.peers.size,), row, gathered, *words)

    def barrier(self, stage: str, position: tuple[int, int, int] = NOWHERE) -> None:
        """Wait for all ranks: what a rank wrote before, all ranks can read afterwards."""
        if self.peers.size > 1:
            self.share(self._nothing, self._nothing, position, stage)

    def check(self) -> None:
        """Raise if a rank did not signal in time; waits for the device."""
        fault = int(self.words[signals.FAULT.value])
        if fault:
            stage, peer = divmod(fault - 1, signals.RANKS.value)
            peer, own = peer + self._first_rank, self.peers.rank + self._first_rank
            if stage == MISMATCH:
                self._compare_positions()
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

    def _compare_positions(self) -> None:
        """Raise if ranks were at different positions at the last barrier of this rank."""
        positions = [Position.from_words(*words[:2]) for words in self.positions[:-1].tolist()]
        compare_positions(positions, positions[self.peers.rank])


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
