"""A dispatcher of rows by physical expert, with autograd of its own."""

import numpy as np
import torch

from ultraep.dispatch import Received


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
        """Sum the outputs of each token."""
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
