"""Dispatchers of rows by physical expert: with autograd of its own, and shuffling rows."""

import numpy as np
import torch

from ultraep.dispatch import Received
from ultraep.dispatchers import LibraryRows, RawDispatcher


class Permuting:
    """Moves rows to physical experts and back, like DeepEP, which has no replicas.

    first: first physical expert of every rank, and the end.
    """

    def __init__(self, comm, first):
        self.comm, self.first = comm, torch.tensor(first.tolist())

    def dispatch(self, tokens, experts_TK, gates_TK):
        """Return rows and gates by physical expert, their counts, and arguments for `combine`."""
        flat = experts_TK.flatten()
        order = flat.argsort(stable=True)[(flat < 0).sum() :]  # without padding
        rank_of = torch.bucketize(flat[order], self.first[1:], right=True)
        sent = torch.bincount(rank_of, minlength=self.comm.size)
        received = self.comm.all_gather(sent)[:, self.comm.rank]
        there = Transfer(self.comm, sent.tolist(), received.tolist())
        arrived = there.move(flat[order]) - self.first[self.comm.rank]
        sort = arrived.argsort(stable=True)
        rows = Moved.apply(tokens[order // experts_TK.shape[1]], there)[sort]
        gates = Moved.apply(gates_TK.flatten()[order], there)[sort]
        own = int(self.first[self.comm.rank + 1] - self.first[self.comm.rank])
        counts = torch.bincount(arrived, minlength=own).tolist()
        return rows, gates, counts, (there, sort, order, experts_TK.shape)

    def combine(self, outputs, state):
        there, sort, order, (tokens, choices) = state
        back = Moved.apply(outputs[sort.argsort()], there.reversed())
        sums = torch.zeros(tokens, outputs.shape[1], dtype=outputs.dtype)
        return sums.index_add(0, order // choices, back)


class Transfer:
    """An all-to-all with these row counts per rank."""

    def __init__(self, comm, sent, received):
        self.comm, self.sent, self.received = comm, sent, received

    def move(self, rows):
        return self.comm.all_to_all(rows.contiguous(), self.sent, self.received)

    def reversed(self):
        return Transfer(self.comm, self.received, self.sent)


class Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, transfer):
        ctx.transfer = transfer
        return transfer.move(rows)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.transfer.reversed().move(gradient), None


class Differentiable:
    """Permutes rows with differentiable functions, like the dispatchers of frameworks.

    Its gates stay at home: `combine` multiplies the outputs by them.
    """

    ordered = True

    def __init__(self, comm):
        self.comm = comm

    def dispatch(self, tokens, gates, routes):
        first = np.arange(routes.ranks + 1) * routes.slots_per_rank
        permuting = Permuting(self.comm, first)
        rows, gates, counts, back = permuting.dispatch(tokens, routes.slots, gates)
        return Received(rows, torch.ones_like(gates), counts, (permuting, back, gates))

    def combine(self, outputs, received):
        permuting, back, gates = received.state
        return permuting.combine(outputs * gates[:, None], back)


class Shuffling(RawDispatcher):
    """Moves rows without autograd: shuffles the rows of a slot, and appends rows of NaN.

    ordered: do not shuffle.   padding_rows: how many rows to append.
    """

    def __init__(self, comm, *, ordered=False, padding_rows=0):
        self.comm, self.ordered, self.padding_rows = comm, ordered, padding_rows
        self.draw = torch.Generator().manual_seed(comm.rank)

    def begin(self, routes):
        return ShuffledRows(self, routes)


class ShuffledRows(LibraryRows):
    def __init__(self, dispatcher, routes):
        comm, slots = dispatcher.comm, routes.slots.flatten()
        self.shape, self.padding_rows = routes.slots.shape, dispatcher.padding_rows
        self.order = slots.argsort(stable=True)[(slots < 0).sum() :]
        sent = torch.bincount(slots[self.order] // routes.slots_per_rank, minlength=comm.size)
        received = comm.all_gather(sent)[:, comm.rank]
        self.there = Transfer(comm, sent.tolist(), received.tolist())
        arrived = self.there.move(slots[self.order]) - comm.rank * routes.slots_per_rank
        self.counts = torch.bincount(arrived, minlength=routes.slots_per_rank)
        rows = torch.arange(len(arrived))
        if not dispatcher.ordered:
            rows = torch.randperm(len(arrived), generator=dispatcher.draw)
        self.sort = rows[arrived[rows].argsort(stable=True)]

    def to_slots(self, values, scalars):
        rows = self.arrived(values[self.order // self.shape[1]])
        return rows, None if scalars is None else self.arrived(scalars.flatten()[self.order])

    def arrived(self, values):
        nan = values.new_full((self.padding_rows, *values.shape[1:]), torch.nan)
        return torch.cat([self.there.move(values)[self.sort], nan])

    def to_tokens(self, rows, scalars):
        sums = rows.new_zeros(self.shape[0], rows.shape[1])
        sums.index_add_(0, self.order // self.shape[1], self.back(rows))
        if scalars is None:
            return sums, None
        gates = scalars.new_zeros(self.shape).flatten()
        return sums, gates.index_copy_(0, self.order, self.back(scalars)).view(self.shape)

    def back(self, values):
        return self.there.reversed().move(values[self.sort.argsort()])
