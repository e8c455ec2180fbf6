"""The rows of one microbatch, moved by a dispatcher of another library.

The data plane still counts, plans, replicates, reroutes and reduces. In backward, the stages begin
and end when gradients pass marks at the four borders of the dispatcher:

    tokens -> |end| dispatch |dispatch back| -> experts
           -> |experts back| combine |combine back| -> outputs

Shapes: T tokens, K experts per token, A arrived rows, L slots of this rank, D model width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from ultraep.comm import Communicator, moved, raise_together
from ultraep.dispatch import Arrivals, Dispatcher, Exchange, Received, SlotRoutes
from ultraep.errors import CommunicationError, ConfigError
from ultraep.ops.modes import outside_dispatch_modes, seen_by_modes
from ultraep.ops.recompute import Gradients, first_order, save
from ultraep.topology import Topology

END = ""  # the mark after the last stage


class DispatchedRows:
    """Stages 5 and 7 of one microbatch through a dispatcher.

    exchange: of the data plane; it has the slots of the rows.
    first: whether this is the first microbatch of its layer; counts on a GPU are compared only
        there, since that waits for the device.
    """

    def __init__(
        self, dispatcher: Dispatcher, exchange: Exchange, routes: SlotRoutes, *, first: bool
    ) -> None:
        self._dispatcher, self._exchange, self._routes = dispatcher, exchange, routes
        self._first, self._rows = first, 0
        self._received: Received | None = None

    def dispatch(self, tokens_TD: torch.Tensor, gates_TK: torch.Tensor) -> Arrivals:
        if seen_by_modes() and not getattr(self._dispatcher, "ordered", False):
            raise ConfigError(
                f"{_name(self._dispatcher)} may deliver rows in another order when backward "
                "recomputes them, so selective checkpointing and other dispatch modes would mix "
                "them up: recompute all ops; see `ordered` in docs/dispatchers.md"
            )
        exchange, record = self._exchange, self._exchange.passes.record
        tokens_TD, gates_TK = _mark(exchange, END, tokens_TD, gates_TK)
        record.at("dispatch")
        received = self._dispatcher.dispatch(tokens_TD, gates_TK, self._routes)
        problem = _delivery_problem(received, self._routes, tokens_TD, wait=self._first)
        if problem:
            raise CommunicationError(f"{_name(self._dispatcher)} {problem}")
        self._received, self._rows = received, len(received.rows)
        if not getattr(received.counts, "is_cuda", False):  # networks get no unused rows
            self._rows = sum(self._routes.counts())
        record.at("experts")
        own = slice(self._rows)
        rows_AD, gates_A = _mark(exchange, "dispatch back", received.rows[own], received.gates[own])
        return Arrivals(rows_AD, gates_A, exchange)

    def combine(self, outputs_AD: torch.Tensor) -> torch.Tensor:
        exchange, received = self._exchange, self._received
        if received is None:
            raise ConfigError("call dispatch() before combine(), once for each microbatch")
        if len(outputs_AD) != self._rows:
            raise ConfigError(
                f"combine() needs one output for each of the {self._rows} rows of this "
                f"microbatch, got {len(outputs_AD)}; pass the outputs of the same microbatch"
            )
        self._received = None  # a handle serves one microbatch
        (outputs_AD,) = _mark(exchange, "experts back", outputs_AD)
        exchange.passes.record.at("combine")
        if len(received.rows) > self._rows:
            outputs_AD = pad(outputs_AD, (0, 0, 0, len(received.rows) - self._rows))
        y_TD = self._dispatcher.combine(outputs_AD, received)
        problem = _sums_problem(y_TD, self._routes, outputs_AD)
        if problem:
            raise CommunicationError(f"{_name(self._dispatcher)} {problem}")
        (y_TD,) = _mark(exchange, "combine back", y_TD)
        return y_TD


def _name(dispatcher: Dispatcher) -> str:
    return type(dispatcher).__qualname__


@outside_dispatch_modes
def _delivery_problem(
    received: Received, routes: SlotRoutes, tokens_TD: torch.Tensor, *, wait: bool
) -> str:
    """Return how the received rows differ from the planned ones; empty if they do not.

    wait: whether to compare counts that are on a GPU.
    """
    rows, gates, counts = received.rows, received.gates, received.counts
    if rows.ndim != 2 or rows.shape[1] != tokens_TD.shape[1] or rows.dtype != tokens_TD.dtype:
        return (
            f"must deliver rows [A, {tokens_TD.shape[1]}] {tokens_TD.dtype}, got "
            f"{list(rows.shape)} {rows.dtype}"
        )
    if gates.shape != rows.shape[:1]:
        return f"must deliver a gate for each of {len(rows)} rows, got {list(gates.shape)}"
    if isinstance(counts, torch.Tensor):
        if counts.is_cuda and not wait:
            return ""
        counts = counts.tolist()
    delivered, planned = [int(count) for count in counts], routes.counts()
    if len(delivered) != len(planned):
        return f"must count the rows of {len(planned)} slots, got {len(delivered)} counts"
    for slot, pair in enumerate(zip(delivered, planned, strict=True)):
        if len(set(pair)) > 1:
            return (
                f"delivered {sum(delivered)} rows to rank {routes.rank}, the plan says "
                f"{sum(planned)}; the first difference is slot {slot}: {pair[0]}, planned {pair[1]}"
            )
    if len(rows) < sum(planned):
        return f"counted {sum(planned)} rows on rank {routes.rank}, but delivered {len(rows)}"
    return ""


def _sums_problem(y_TD: torch.Tensor, routes: SlotRoutes, outputs_AD: torch.Tensor) -> str:
    """Return whether the result of `combine` has the wrong shape; empty if it does not."""
    shape = [len(routes.slots), outputs_AD.shape[1]]
    if list(y_TD.shape) == shape and y_TD.dtype == outputs_AD.dtype:
        return ""
    return (
        f"must combine rows to {shape} {outputs_AD.dtype}, one for each token of this microbatch, "
        f"got {list(y_TD.shape)} {y_TD.dtype}: is its handle from another microbatch?"
    )


PROBE_TOKENS = 16  # of a rank; more with many ranks
LARGEST = 128  # sum of the labels of a token; with gates of 2, bfloat16 is exact up to there


@outside_dispatch_modes
@torch.no_grad()
def probe(
    dispatcher: Dispatcher, routes: SlotRoutes, tokens_TD: torch.Tensor, comm: Communicator
) -> None:
    """Send known rows through a dispatcher; raise on all ranks if one gets wrong rows. Collective.

    The routes are synthetic: each rank sends rows to each rank, in descending order of slots. Rows
    are random zeros and ones, and are combined with gates of 1 and 2, times a label of their slot.

    routes, tokens_TD: of any microbatch, for their shapes, dtype and device.
    """
    most, padding = getattr(dispatcher, "max_tokens", None), getattr(dispatcher, "padding", True)
    routes = _probe_routes(routes, most, padding=padding)
    slots_TK, dtype, device = routes.slots, tokens_TD.dtype, tokens_TD.device
    top_k = slots_TK.shape[1]
    random = torch.Generator().manual_seed(routes.rank)
    sent_TD = torch.randint(2, (len(slots_TK), tokens_TD.shape[1]), generator=random)
    sent_TD = sent_TD.to(device, dtype)
    gates_TK = 1 + torch.arange(top_k, device=device) % 2
    gates_TK = gates_TK.to(dtype).expand_as(slots_TK)
    received = dispatcher.dispatch(sent_TD, gates_TK, routes)
    problem = _delivery_problem(received, routes, sent_TD, wait=True)
    _raise_on_all_ranks(dispatcher, comm, problem)
    # Neighbouring slots have different labels, so rows in the wrong slots change the sums.
    labels = torch.arange(routes.num_slots, device=device) % max(2, LARGEST // top_k) + 1
    labels = labels.to(dtype)
    own = labels[routes.rank * routes.slots_per_rank :][: routes.slots_per_rank]
    label_of_row = own.repeat_interleave(torch.tensor(routes.counts(), device=device))
    outputs_AD = received.rows * received.gates[:, None].to(dtype)
    outputs_AD[: len(label_of_row)] *= label_of_row[:, None]
    y_TD = dispatcher.combine(outputs_AD, received)
    problem = _sums_problem(y_TD, routes, outputs_AD)
    if not problem:
        factors_TK = gates_TK * labels[slots_TK] * (slots_TK >= 0)
        wrong = (y_TD != sent_TD * factors_TK.sum(dim=1, keepdim=True)).any(dim=1).nonzero()
        if len(wrong):
            problem = (
                f"returned wrong sums for {len(wrong)} of {len(y_TD)} tokens of rank "
                f"{routes.rank}, first for token {int(wrong[0])}, in a probe: it loses, repeats or "
                "mixes up rows, or does not order them by slot"
            )
    _raise_on_all_ranks(dispatcher, comm, problem)


def _raise_on_all_ranks(dispatcher: Dispatcher, comm: Communicator, problem: str) -> None:
    """Raise on all ranks if one has a problem; collective."""
    text = f"{_name(dispatcher)} {problem}"
    raise_together(comm, CommunicationError(text) if problem else None)


def _probe_routes(like: SlotRoutes, most: int | None, *, padding: bool) -> SlotRoutes:
    """Return synthetic routes of this rank, with padding.

    Choice `i` of a rank goes to the `i`-th next rank, from its last slot to its first.
    """
    ranks, slots_per_rank, top_k = like.ranks, like.slots_per_rank, like.slots.shape[1]
    tokens = max(PROBE_TOKENS, -(-2 * ranks // top_k))
    tokens = tokens if most is None else min(tokens, most)
    choice, rank = torch.arange(tokens * top_k), torch.arange(ranks)[:, None]
    slots = (choice + rank) % ranks * slots_per_rank + (-1 - choice // ranks) % slots_per_rank
    if padding:
        slots[:, 3::7] = -1
        slots[1::2, -top_k:] = -1
    own = slots[slots.div(slots_per_rank, rounding_mode="floor") == like.rank]
    counts = torch.bincount(own - like.rank * slots_per_rank, minlength=slots_per_rank)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    device, begins = like.slots.device, offsets.tolist()
    return replace(
        like,
        slots=slots[like.rank].view(tokens, top_k).to(device),
        offsets=offsets.to(device, torch.int32),
        begins=lambda: begins,
    )


def slot_routes(exchange: Exchange, topology: Topology, rank: int) -> SlotRoutes:
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


def _mark(exchange: Exchange, stage: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors; when their gradients arrive, a stage of backward begins."""
    marked: tuple[torch.Tensor, ...]
    marked = _Mark.apply(exchange, stage, *tensors)  # type: ignore[no-untyped-call]
    return marked


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, stage: str, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        save(ctx, exchange)
        ctx.stage = stage
        ctx.set_materialize_grads(False)
        marked = tuple(tensor.view_as(tensor) for tensor in tensors)
        required = zip(marked, ctx.needs_input_grad[2:], strict=True)
        ctx.mark_non_differentiable(*[tensor for tensor, requires in required if not requires])
        return marked

    @staticmethod
    @first_order
    def backward(ctx: Any, exchange: Exchange, gradients: Gradients, _: Any) -> Gradients:
        if ctx.stage == "combine back":
            exchange.begin_backward()
        elif ctx.stage == END:
            exchange.passes.record.end()
        else:
            exchange.passes.record.at(ctx.stage)
        return None, None, *gradients
