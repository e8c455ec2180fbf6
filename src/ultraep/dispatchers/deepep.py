"""Rows through DeepEP: `ElasticBuffer` of version 2, and the older `Buffer`.

    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8)
    balancer = Balancer(group, experts=256, slots=2, dispatcher=DeepEP(buffer))

The older buffer sends a token once to each rank, however many of its slots are there. Here, its
rows are copied to the slots, and their outputs are summed before they are sent back.

Shapes: T tokens, K experts per token, U received tokens, A arrived rows, D model width.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from ultraep.dispatch import Moved, SlotRoutes
from ultraep.dispatchers import LibraryRows, RawDispatcher, check_buffer
from ultraep.errors import ConfigError
from ultraep.ops.products import accumulator
from ultraep.supported import ELASTIC_BUFFER, LEGACY_BUFFER

WIDTH_MULTIPLE = 256  # bfloat16 numbers: 16 bytes for each thread of a warp
NODE, MOST_SLOTS = 8, 128  # ranks of a node, slots of a rank


class DeepEP(RawDispatcher):
    """Moves rows with a `deep_ep.ElasticBuffer` of DeepEP 2.

    buffer: for the group of the balancer; `num_max_tokens_per_rank` must cover every microbatch.
        `deterministic=True` allows selective checkpointing.
    num_sms: multiprocessors for the kernels of the library; 0: it chooses them.
    """

    dtypes, width_multiple = (torch.bfloat16,), WIDTH_MULTIPLE

    def __init__(self, buffer: Any, *, num_sms: int = 0) -> None:
        routing = ("topk_idx", "topk_weights", "num_experts", "handle", "do_expand", "num_sms")
        check_buffer(
            buffer,
            ELASTIC_BUFFER,
            dispatch=("x", *routing),
            combine=("x", "handle", "topk_weights"),
            get_theoretical_num_sms=("num_experts", "num_topk"),
        )
        if not buffer.allow_multiple_reduction:
            raise ConfigError(
                "DeepEP cannot send gradients of gates: create the ElasticBuffer with "
                "allow_multiple_reduction=True"
            )
        self.buffer, self.num_sms = buffer, num_sms
        self.max_tokens, self.ordered = buffer.num_max_tokens_per_rank, buffer.deterministic

    def check_slots(self, ranks: int, slots_per_rank: int) -> None:
        try:
            self.num_sms or self.buffer.get_theoretical_num_sms(ranks * slots_per_rank, num_topk=1)
        except ZeroDivisionError:
            raise ConfigError(
                "the ElasticBuffer detects no bandwidth here, so it cannot choose a number of "
                "multiprocessors: pass DeepEP(buffer, num_sms=)"
            ) from None

    def begin(self, routes: SlotRoutes) -> _ExpandedRows:
        return _ExpandedRows(self, _with_ids_of_library(self.buffer, routes))


class _ExpandedRows(LibraryRows):
    """The rows of one microbatch; the library delivers one row for each slot of a token."""

    def __init__(self, dispatcher: DeepEP, routes: SlotRoutes) -> None:
        self._buffer, self._routes, self._handle = dispatcher.buffer, routes, None
        self._num_sms = dispatcher.num_sms

    def to_slots(self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None) -> Moved:
        first = self._handle is None
        known = {"topk_idx": self._routes.slots} if first else {"handle": self._handle}
        received, _, scalars_A, handle, _ = self._buffer.dispatch(
            values_TD.contiguous(),
            topk_weights=None if scalars_TK is None else scalars_TK.contiguous(),
            num_experts=self._routes.num_slots,
            do_expand=True,
            num_sms=self._num_sms,
            **known,
        )
        if first:
            self._handle, self.counts = handle, handle.num_recv_tokens_per_expert_list
        return received, scalars_A

    def to_tokens(self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None) -> Moved:
        scalars_A = None if scalars_A is None else scalars_A.contiguous()
        sums_TD, scalars_TK, _ = self._buffer.combine(
            rows_AD.contiguous(), self._handle, topk_weights=scalars_A
        )
        return sums_TD, _without_padding(scalars_TK, self._routes)


class DeepEPBuffer(RawDispatcher):
    """Moves rows with a `deep_ep.Buffer`, of DeepEP 1 or 2, inside a node or between nodes.

    buffer: for the group of the balancer.
    """

    dtypes, width_multiple, ordered = (torch.bfloat16,), WIDTH_MULTIPLE, True

    def __init__(self, buffer: Any) -> None:
        layout = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert")
        check_buffer(
            buffer,
            LEGACY_BUFFER,
            get_dispatch_layout=("topk_idx", "num_experts"),
            dispatch=("x", "handle", "topk_idx", "topk_weights", "is_token_in_rank", *layout),
            combine=("x", "handle", "topk_weights"),
        )
        self.buffer = buffer

    def check_slots(self, ranks: int, slots_per_rank: int) -> None:
        if ranks not in (2, 4) and (ranks < NODE or ranks % NODE):
            raise ConfigError(
                f"the Buffer of DeepEP serves 2, 4 or 8 ranks, or several nodes of {NODE}, got "
                f"{ranks}; leave dispatcher= out"
            )
        if slots_per_rank > MOST_SLOTS:
            raise ConfigError(
                f"the Buffer of DeepEP serves at most {MOST_SLOTS} experts of a rank, got "
                f"{slots_per_rank} home experts and spare slots; use more ranks or fewer slots"
            )

    def begin(self, routes: SlotRoutes) -> _RowsOfTokens:
        return _RowsOfTokens(self, _with_ids_of_library(self.buffer, routes))


class _RowsOfTokens(LibraryRows):
    """The rows of one microbatch; the library delivers each token once to this rank.

    _local: [U, K] slot of this rank for each choice of a received token; -1: on another rank.
    _order: [A] choice `token * K + k` of each row, in slot order.
    """

    def __init__(self, dispatcher: DeepEPBuffer, routes: SlotRoutes) -> None:
        self._buffer, self._routes, self._handle = dispatcher.buffer, routes, None
        self._local = self._order = self._token_of_row = routes.slots  # until rows have arrived

    def to_slots(self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None) -> Moved:
        x = values_TD.contiguous()
        if self._handle is not None:
            received, *_ = self._buffer.dispatch(x, handle=self._handle)
            return received.index_select(0, self._token_of_row), None
        slots, gates_TK = self._routes.slots, scalars_TK
        assert gates_TK is not None, "the first rows carry gates"
        per_rank, per_rdma_rank, per_slot, in_rank, _ = self._buffer.get_dispatch_layout(
            slots, self._routes.num_slots
        )
        received, local, gates_UK, self.counts, self._handle, _ = self._buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_slot,
            topk_idx=slots,
            topk_weights=gates_TK.contiguous(),
        )
        elsewhere = local.numel() - sum(self.counts)
        self._local, self._order = local, local.flatten().argsort(stable=True)[elsewhere:]
        self._token_of_row = self._order // local.shape[1]
        rows_AD = received.index_select(0, self._token_of_row)
        return rows_AD, gates_UK.flatten().index_select(0, self._order)

    def to_tokens(self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None) -> Moved:
        scalars_UK = None
        if scalars_A is not None:
            scalars_UK = scalars_A.new_zeros(self._local.shape)
            scalars_UK.view(-1)[self._order] = scalars_A[: len(self._order)]
        sums_TD, scalars_TK, _ = self._buffer.combine(
            self._sums(rows_AD), self._handle, topk_weights=scalars_UK
        )
        return sums_TD, _without_padding(scalars_TK, self._routes)

    def _sums(self, rows_AD: torch.Tensor) -> torch.Tensor:
        """Return [U, D] the sum of the rows of each received token, in router order."""
        shape = len(self._local), rows_AD.shape[1]
        sums = rows_AD.new_zeros(shape, dtype=accumulator(rows_AD.dtype))
        if not len(self._order):
            return sums.to(rows_AD.dtype)
        positions = torch.zeros_like(self._local, dtype=torch.int64)
        numbers = torch.arange(len(self._order), device=positions.device)
        positions.view(-1)[self._order] = numbers
        for local, position in zip(self._local.unbind(1), positions.unbind(1), strict=True):
            sums += rows_AD.index_select(0, position).masked_fill_((local < 0)[:, None], 0)
        return sums.to(rows_AD.dtype)


def _with_ids_of_library(buffer: Any, routes: SlotRoutes) -> SlotRoutes:
    """Return routes with slot ids in the integer type that the library was built for."""
    library = sys.modules.get(type(buffer).__module__.partition(".")[0])
    return replace(routes, slots=routes.slots.to(getattr(library, "topk_idx_t", torch.int64)))


def _without_padding(scalars_TK: torch.Tensor | None, routes: SlotRoutes) -> torch.Tensor | None:
    """Return scalars with zeros for padding, which the library leaves undefined."""
    return None if scalars_TK is None else scalars_TK.masked_fill(routes.slots < 0, 0)
