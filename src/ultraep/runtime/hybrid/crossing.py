"""Crossing: the tokens of one microbatch that travel between fast-link domains.

The rank at place p of a domain exchanges tokens with the ranks at place p of all other domains. A
token crosses once to every domain that serves it, with the slots and gates of its choices there,
and the rank that receives it spreads it inside of its domain like a token of its own. On the way
back, the rows of a token are summed inside of the domain, and the sum crosses.

A row stays in the domain of its expert's home, whichever replica serves it. So `Domains.counts`
knows how many tokens cross before the plan is made.

Shapes: T tokens of this rank, K experts per token, X of its tokens that cross, counted for every
domain, T' its tokens and those that arrive, R ranks, D domains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from ultraep.arrays import PADDING, IntArray
from ultraep.comm import Communicator
from ultraep.ops.products import accumulator
from ultraep.runtime.torch_dist import as_bytes
from ultraep.topology import Topology


class Domains:
    """The domains of a topology, as tables on the device of the tokens."""

    def __init__(self, topology: Topology, rank: int, device: torch.device) -> None:
        self.topology, self.size = topology, topology.domain_size
        self.own, self.place = divmod(rank, self.size)
        homes = np.append(topology.home_of_expert // self.size, PADDING)
        self._home_of_expert = torch.from_numpy(homes).to(device)  # the last: of padding
        firsts = topology.first_slot_of_rank[: -1 : self.size].copy()
        self.first_slots = torch.from_numpy(firsts).to(device)
        self.numbers = torch.arange(topology.num_domains, device=device)

    def counts(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """Return [D] how many of the tokens have an expert in each domain."""
        experts = self.topology.experts
        known = (ids_TK >= 0) & (ids_TK < experts)
        domain_TK = self._home_of_expert[torch.where(known, ids_TK, experts).long()]
        return self._served(domain_TK).sum(1)

    def _served(self, domain_TK: torch.Tensor) -> torch.Tensor:
        """Return [D, T] whether a domain serves a token."""
        return (domain_TK == self.numbers[:, None, None]).any(-1)

    def of_slots(self, slots_TK: torch.Tensor) -> torch.Tensor:
        """Return [T, K] the domain of every slot; -1: padding."""
        return torch.bucketize(slots_TK, self.first_slots, right=True) - 1

    def crossing(self, domain_TK: torch.Tensor, num: int) -> torch.Tensor:
        """Return [num, 2] domain and token of everything that crosses, by domain."""
        served = self._served(domain_TK)
        served[self.own] = False
        return torch.nonzero_static(served, size=num)

    def local(
        self, slots: torch.Tensor, domains: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Return the slots of the wanted domains, counted from their first slot; others are -1."""
        return torch.where(domains == wanted, slots - self.first_slots[wanted], PADDING).int()


class Crossing:
    """The tokens of one microbatch that cross.

    slots: [T, K] global slots of the rows.   counts: [R, D] `Domains.counts` of all ranks.
    """

    def __init__(
        self, domains: Domains, comm: Communicator, slots_TK: torch.Tensor, counts: IntArray
    ) -> None:
        self._domains, self._comm, self._slots = domains, comm, slots_TK
        size, own, place = domains.size, domains.own, domains.place
        sent, arrived = counts[comm.rank].copy(), counts[place::size, own].copy()
        sent[own] = arrived[own] = 0
        self._sent: list[int] = sent.tolist()  # by domain
        self._send_counts, self._receive_counts = (
            _at_place(numbers, place, size) for numbers in (sent, arrived)
        )

    @cached_property
    def _of_slots(self) -> torch.Tensor:
        return self._domains.of_slots(self._slots)

    @cached_property
    def _pairs(self) -> torch.Tensor:
        """[X, 2] domain and token."""
        return self._domains.crossing(self._of_slots, sum(self._sent))

    @cached_property
    def _tokens_that_cross(self) -> torch.Tensor:
        """[X]."""
        return self._pairs[:, 1].contiguous()

    def _leaving(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [value.index_select(0, self._tokens_that_cross) for value in values]

    def to_domains(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """Return [T', ...] of each [T, ...]: own tokens, then those that arrive."""
        return self._with_arrived(values, self._leaving(values))

    def to_domains_first(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """Like `to_domains`; return also the [T', K] slots in this domain, counted from its first.

        They are the last of the result.
        """
        domains, own = self._domains, self._domains.own
        wanted = domains.numbers[own : own + 1]  # no scalar: as an index it makes the host wait
        local = domains.local(self._slots, self._of_slots, wanted)
        slots, of_slots = self._leaving([self._slots, self._of_slots])
        leaving = domains.local(slots, of_slots, self._pairs[:, :1])
        return self._with_arrived([*values, local], [*self._leaving(values), leaving])

    def _with_arrived(
        self, own: Sequence[torch.Tensor], leaving: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        arrived = self._moved(leaving, self._send_counts, self._receive_counts)
        return [torch.cat(pair) for pair in zip(own, arrived, strict=True)]

    def to_tokens(self, *sums: torch.Tensor) -> list[torch.Tensor]:
        """Return [T, ...] of each [T', ...]: the sums of all domains, added in their order."""
        tokens = len(self._slots)
        leaving = [value[tokens:] for value in sums]
        arrived = self._moved(leaving, self._receive_counts, self._send_counts)
        return [
            self._added(value[:tokens], parts) for value, parts in zip(sums, arrived, strict=True)
        ]

    def _added(self, own: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
        total = own.to(accumulator(own.dtype))
        total = total.clone() if total is own else total
        tokens = self._tokens_that_cross.split(self._sent)
        parts = zip(tokens, arrived.split(self._sent), strict=True)
        for token, part in parts:  # a token occurs once in each part, so the order is fixed
            total.index_add_(0, token, part.to(total.dtype))
        return total.to(own.dtype)

    def _moved(
        self, values: Sequence[torch.Tensor], sent: list[int], received: list[int]
    ) -> list[torch.Tensor]:
        """Send [X, ...] tensors in one message to every domain; return those that arrive."""
        if len(values) == 1:
            return [self._comm.all_to_all(values[0].contiguous(), sent, received)]
        rows = [_as_bytes(value) for value in values]
        arrived = self._comm.all_to_all(torch.cat(rows, dim=1), sent, received)
        parts = arrived.split([row.shape[1] for row in rows], dim=1)
        return [_as_values(part, value) for part, value in zip(parts, values, strict=True)]


def _at_place(numbers_D: IntArray, place: int, size: int) -> list[int]:
    """Return [R] the numbers at the ranks of one place of all domains, 0 at others."""
    of_ranks = np.zeros((len(numbers_D), size), np.int64)
    of_ranks[:, place] = numbers_D
    result: list[int] = of_ranks.reshape(-1).tolist()
    return result


def _as_values(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return [X, ...] of [X, bytes], as one value of packed rows; a view if it is aligned."""
    size = like.itemsize
    if part.storage_offset() % size or part.stride(0) % size:
        part = part.clone(memory_format=torch.contiguous_format)
    return part.view(like.dtype).view(len(part), *like.shape[1:])


def _as_bytes(value: torch.Tensor) -> torch.Tensor:
    """Return [X, bytes] of [X, ...]."""
    return as_bytes(value).view(len(value), math.prod(value.shape[1:]) * value.itemsize)
