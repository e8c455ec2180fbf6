"""The rows of one microbatch, moved by a dispatcher of another library.

The data plane still counts, plans, replicates, reroutes and reduces. Marks at the four borders of
the dispatcher tell observers where the stages begin and end, in forward and in backward:

    tokens -> |leave_tokens| dispatch |reach_slots| -> experts
           -> |leave_slots|  combine  |reach_tokens| -> outputs

Shapes: T tokens, K experts per token, A arrived rows, L slots of this rank, D model width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ultraep.comm import moved
from ultraep.dispatch import Arrivals, Dispatcher, Pack, Received, SlotRoutes
from ultraep.errors import CommunicationError, ConfigError
from ultraep.ops.modes import hidden
from ultraep.ops.recompute import Gradients, first_order, save
from ultraep.runtime.observe import BaseExchange
from ultraep.topology import Topology


class DispatchedRows:
    """Stages 5 and 7 of one microbatch through a dispatcher.

    exchange: of the data plane; it has the slots of the rows.
    wait: whether to compare the counts even if that waits for a device.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        exchange: BaseExchange,
        topology: Topology,
        rank: int,
        *,
        wait: bool,
    ) -> None:
        self._dispatcher, self._exchange, self._wait = dispatcher, exchange, wait
        self._routes = slot_routes(exchange, topology, rank)
        self._received: Received | None = None

    def dispatch(
        self, tokens_TD: torch.Tensor, gates_TK: torch.Tensor, pack: Pack | None
    ) -> Arrivals:
        exchange = self._exchange
        tokens_TD, gates_TK = _mark(exchange, "reach_tokens", tokens_TD, gates_TK)
        exchange.leave_tokens()
        received = self._dispatcher.dispatch(tokens_TD, gates_TK, self._routes, pack)
        self._check(received, tokens_TD, pack)
        self._received = received
        exchange.reach_slots()
        rows_AD, gates_A = _mark(exchange, "leave_slots", received.rows, received.gates)
        return Arrivals(rows_AD, gates_A, exchange, received.packed)

    def combine(self, outputs_AD: torch.Tensor) -> torch.Tensor:
        exchange, received = self._exchange, self._received
        if received is None:
            raise ConfigError("call dispatch() first: its result belongs to combine()")
        self._received = None  # a handle serves one microbatch
        if len(outputs_AD) != len(received.rows):
            raise ConfigError(
                f"combine() needs one output for each of the {len(received.rows)} rows of this "
                f"microbatch, got {len(outputs_AD)}; pass the outputs of the same microbatch"
            )
        (outputs_AD,) = _mark(exchange, "reach_slots", outputs_AD)
        exchange.leave_slots()
        y_TD = self._dispatcher.combine(outputs_AD, received)
        shape = [len(self._routes.slots), outputs_AD.shape[1]]
        if list(y_TD.shape) != shape:
            raise CommunicationError(
                f"{self._name}.combine must return {shape}, one row for each token of this "
                f"microbatch, got {list(y_TD.shape)}: the handle may be from another microbatch"
            )
        exchange.reach_tokens()
        (y_TD,) = _mark(exchange, "begin_backward leave_tokens", y_TD)
        return y_TD

    @property
    def _name(self) -> str:
        return type(self._dispatcher).__qualname__

    @hidden
    def _check(self, received: Received, tokens_TD: torch.Tensor, pack: Pack | None) -> None:
        """Raise if the rows are not the planned ones."""
        rows, gates, counts = received.rows, received.gates, received.counts
        if rows.ndim != 2 or rows.shape[1] != tokens_TD.shape[1] or rows.dtype != tokens_TD.dtype:
            raise CommunicationError(
                f"{self._name} must deliver rows [A, {tokens_TD.shape[1]}] {tokens_TD.dtype}, got "
                f"{list(rows.shape)} {rows.dtype}"
            )
        if gates.shape != rows.shape[:1]:
            raise CommunicationError(
                f"{self._name} delivered {len(rows)} rows with gates {list(gates.shape)}; it must "
                "deliver one gate for each row"
            )
        if pack is not None and (received.packed is None or len(received.packed) != len(rows)):
            raise CommunicationError(
                f"{self._name} delivered {len(rows)} rows without their packed bytes; it must "
                "return `Received.packed` or refuse `pack`"
            )
        if isinstance(counts, torch.Tensor):
            if counts.is_cuda and not self._wait:
                return
            counts = counts.tolist()
        self._check_counts([int(count) for count in counts], len(rows))

    def _check_counts(self, counts: list[int], num_rows: int) -> None:
        planned, rank = self._routes.counts(), self._routes.rank
        if counts != planned:
            raise CommunicationError(
                f"{self._name} delivered {sum(counts)} rows to rank {rank}, the plan says "
                f"{sum(planned)}; rows of its slots: {_differing(counts, planned)}"
            )
        if num_rows < sum(planned):
            raise CommunicationError(
                f"{self._name} delivered a tensor of {num_rows} rows to rank {rank}, but counted "
                f"{sum(counts)} rows"
            )


def slot_routes(exchange: BaseExchange, topology: Topology, rank: int) -> SlotRoutes:
    """Return the slots of a microbatch, with ids as if all ranks had the same number of slots."""
    first = topology.first_slot_of_rank
    sizes, ids = np.diff(first), exchange.slots.to(torch.int64, copy=True)  # may be overwritten
    width = int(sizes.max())
    unused, offsets = width - int(sizes[rank]), exchange.offsets
    if sizes.min() < width:
        unused_before = moved(
            torch.from_numpy(np.arange(len(sizes)) * width - first[:-1]), ids.device
        )
        ends = moved(torch.from_numpy(first[1:].copy()), ids.device)
        rank_of_row = torch.bucketize(ids, ends, right=True)
        ids = torch.where(ids < 0, ids, ids + unused_before[rank_of_row])
        offsets = torch.cat([offsets, offsets[-1:].expand(unused)])

    def begins() -> list[int]:
        known = exchange.begins()
        return known + known[-1:] * unused

    return SlotRoutes(ids, offsets, begins, rank, topology.ranks, width)


def _differing(counts: list[int], planned: list[int]) -> str:
    """Describe the first slot whose counts differ."""
    if len(counts) != len(planned):
        return f"{len(counts)} counts for {len(planned)} slots"
    slot = next(i for i, pair in enumerate(zip(counts, planned, strict=True)) if len(set(pair)) > 1)
    return f"slot {slot} got {counts[slot]}, the plan says {planned[slot]}"


def _mark(exchange: BaseExchange, reports: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors; when their gradients arrive, call these methods of the exchange."""
    marked: tuple[torch.Tensor, ...]
    marked = _Mark.apply(exchange, reports, *tensors)  # type: ignore[no-untyped-call]
    return marked


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: BaseExchange, reports: str, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        save(ctx, exchange)
        ctx.reports = reports.split()
        ctx.set_materialize_grads(False)
        marked = tuple(tensor.view_as(tensor) for tensor in tensors)
        required = zip(marked, ctx.needs_input_grad[2:], strict=True)
        ctx.mark_non_differentiable(*[tensor for tensor, requires in required if not requires])
        return marked

    @staticmethod
    @first_order
    def backward(ctx: Any, exchange: BaseExchange, gradients: Gradients, _: Any) -> Gradients:
        for report in ctx.reports:
            getattr(exchange, report)()
        return None, None, *gradients
