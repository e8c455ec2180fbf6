"""Crossing: the rows of one microbatch over several fast-link domains.

The rank at place p of a domain exchanges tokens with the ranks at place p of all other domains. A
token crosses once to every domain that serves it, with the slots and gates of its choices there,
and the rank that receives it spreads it inside of its domain like a token of its own. On the way
back, the rows of a token are summed inside of the domain, and the sum crosses.

A row stays in the domain of its expert's home, whichever replica serves it. So the ids alone
determine how many tokens cross.

Shapes: T tokens of this rank, K experts per token, X of its tokens that cross, counted for every
domain, T' its tokens and those that arrive, A arrived rows, D model width, R ranks, N domains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ultraep.arrays import PADDING, IntArray
from ultraep.comm import Communicator, moved
from ultraep.dispatch import Exchange, Moved
from ultraep.ops.products import accumulator
from ultraep.passes import Passes
from ultraep.runtime.torch_dist import as_bytes
from ultraep.topology import Topology


class Domains:
    """The domains of a topology, as tables on the device of the tokens."""

    def __init__(self, topology: Topology, rank: int, device: torch.device) -> None:
        self.size, self._experts = topology.domain_size, topology.experts
        self.own, self.place = divmod(rank, self.size)
        homes = np.append(topology.home_of_expert // self.size, PADDING)
        self._of_expert = torch.from_numpy(homes).to(device)  # the last: of padding
        firsts = topology.first_slot_of_rank[: -1 : self.size].copy()
        self._first_slots = torch.from_numpy(firsts).to(device)
        self.numbers = torch.arange(topology.num_domains, device=device)

    def of_ids(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """Return [T, K] the domain that serves each choice; -1: padding or an invalid id."""
        known = (ids_TK >= 0) & (ids_TK < self._experts)
        return self._of_expert[torch.where(known, ids_TK, self._experts).long()]

    def serving(self, domains_TK: torch.Tensor) -> torch.Tensor:
        """Return [N, T] whether a domain serves a token."""
        return (domains_TK == self.numbers[:, None, None]).any(-1)

    def local(
        self, slots: torch.Tensor, domains: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Return the slots of the wanted domains, counted from their first slot; others are -1."""
        return torch.where(domains == wanted, slots - self._first_slots[wanted], PADDING).int()


class Crossing:
    """Moves rows between tokens and slots, through the domain of the slots; see `Exchange`.

    comm: all ranks.   slots: [T, K] of all ranks.   of_slots: [T, K] their domains.
    counts: [R, N] tokens of every rank that each domain serves.
    begins: first row of each slot of this rank.
    inside: returns the object that moves [T', K] rows inside of this domain, given their slots.
    at_backward: called when backward begins.
    """

    def __init__(
        self,
        passes: Passes,
        domains: Domains,
        comm: Communicator,
        slots: torch.Tensor,
        of_slots: torch.Tensor,
        counts: IntArray,
        begins: list[int],
        inside: Callable[[torch.Tensor], Exchange],
        at_backward: Callable[[], None],
    ) -> None:
        self.passes, self.slots, self._begins = passes, slots, begins
        self.offsets = moved(torch.tensor(begins, dtype=torch.int32), slots.device)
        self._domains, self._comm, self._of_slots = domains, comm, of_slots
        self._make_inside, self._at_backward = inside, at_backward
        self._inside: Exchange | None = None  # once the slots of other domains have arrived
        sent, arrived = np.zeros((2, comm.size), np.int64)
        at_place = slice(domains.place, None, domains.size)
        sent[at_place], arrived[at_place] = counts[comm.rank], counts[at_place, domains.own]
        sent[comm.rank] = arrived[comm.rank] = 0
        self._send_counts, self._receive_counts = sent.tolist(), arrived.tolist()
        self._sent: list[int] = sent[at_place].tolist()  # by domain

    def begins(self) -> list[int]:
        return self._begins

    def begin_backward(self) -> None:
        self.passes.begin_backward()
        self._at_backward()

    def to_slots(self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None) -> Moved:
        record = self.passes.record
        if not record.backward:
            record.at("dispatch")
        slots = [self._slots_inside()] if self._inside is None else []
        values = [value for value in (values_TD, scalars_TK) if value is not None]
        pairs = [(value, value.index_select(0, self._tokens)) for value in values] + slots
        leaving = [value for _, value in pairs]
        arrived = self._exchange(leaving, self._send_counts, self._receive_counts)
        values = [torch.cat((own, new)) for (own, _), new in zip(pairs, arrived, strict=True)]
        if self._inside is None:
            self._inside = self._make_inside(values.pop())
        rows = self._inside.to_slots(values[0], values[1] if scalars_TK is not None else None)
        record.at("experts", "experts back")
        return rows

    def _slots_inside(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the [X] tokens that cross.

        Returns the [T, K] slots in this domain and the [X, K] slots in the domains of these tokens,
        each counted from the first slot of its domain.
        """
        domains, of_slots, own = self._domains, self._of_slots, self._domains.own
        serving = domains.serving(of_slots)
        serving[own] = False
        crossing = torch.nonzero_static(serving, size=sum(self._sent))  # domain and token
        tokens = self._tokens = crossing[:, 1].contiguous()
        wanted = domains.numbers[own : own + 1]  # no scalar: as an index it makes the host wait
        leaving = self.slots.index_select(0, tokens), of_slots.index_select(0, tokens)
        return (
            domains.local(self.slots, of_slots, wanted),
            domains.local(*leaving, crossing[:, :1]),
        )

    def to_tokens(self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None) -> Moved:
        assert self._inside is not None, "rows move to the slots first"
        record, tokens = self.passes.record, len(self.slots)
        record.at("combine", "dispatch back")
        inside = self._inside.to_tokens(rows_AD, scalars_A)
        sums = [value for value in inside if value is not None]
        leaving = [value[tokens:] for value in sums]
        arrived = self._exchange(leaving, self._receive_counts, self._send_counts)
        sums = [self._added(own[:tokens], new) for own, new in zip(sums, arrived, strict=True)]
        if record.backward:
            record.end()
        return sums[0], sums[1] if scalars_A is not None else None

    def _added(self, own: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
        """Return [T, ...] the sums of this domain and of the others, added in their order."""
        total = own.to(accumulator(own.dtype))
        total = total.clone() if total is own else total
        parts = zip(self._tokens.split(self._sent), arrived.split(self._sent), strict=True)
        for tokens, part in parts:  # a token occurs once in each part, so the order is fixed
            total.index_add_(0, tokens, part.to(total.dtype))
        return total.to(own.dtype)

    def _exchange(
        self, values: Sequence[torch.Tensor], sent: list[int], received: list[int]
    ) -> list[torch.Tensor]:
        """Send [X, ...] tensors in one message to every domain; return those that arrive."""
        if len(values) == 1:
            return [self._comm.all_to_all(values[0].contiguous(), sent, received)]
        rows = [as_bytes(v).view(len(v), v.shape[1] * v.itemsize) for v in values]
        arrived = self._comm.all_to_all(torch.cat(rows, dim=1), sent, received)
        parts = arrived.split([row.shape[1] for row in rows], dim=1)
        return [_as_dtype(part, value.dtype) for part, value in zip(parts, values, strict=True)]


def _as_dtype(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [X, ...] of [X, bytes], a part of packed rows; a view if it is aligned."""
    if part.storage_offset() % dtype.itemsize or part.stride(0) % dtype.itemsize:
        part = part.clone(memory_format=torch.contiguous_format)
    return part.view(dtype)
