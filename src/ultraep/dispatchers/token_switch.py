"""Rows through NCCL EP, by `torch.distributed._token_switch.TokenSwitchNCCL` of torch 2.14.

    slots = 128 + 8 * 2  # of all ranks: 128 home experts, 8 ranks with 2 spare slots each
    switch = TokenSwitchNCCL(group, slots, 4096, 65536, 4096 * 2)
    dispatcher = TokenSwitch(switch, num_experts=slots, max_recv_tokens=65536)
    balancer = Balancer(group, experts=128, slots=2, dispatcher=dispatcher)

The autograd functions of the library have no gradients of gates, so its plain verbs are used. The
gradients of gates travel as rows of their own, one column for each choice of a token.

Shapes: T tokens, K experts per token, A arrived rows, D model width.
"""

from __future__ import annotations

from typing import Any

import torch

from ultraep.config import check_integer
from ultraep.dispatch import Moved, SlotRoutes
from ultraep.dispatchers import LibraryRows, RawDispatcher, check_buffer
from ultraep.errors import ConfigError, LoadError
from ultraep.supported import TOKEN_SWITCH

ROW_BYTES = 16  # rows have multiples of this size
PARTS = 3  # bfloat16 numbers whose sum is a float32 number


class TokenSwitch(RawDispatcher):
    """Moves rows with a `TokenSwitchNCCL`.

    num_experts: of the switch; must be the slots of all ranks, home experts and spare slots.
    max_recv_tokens: `max_recv_tokens_per_rank` of the switch. NCCL EP ends the process if more rows
        arrive, so the dispatcher refuses such a plan.
    """

    dtypes = (torch.bfloat16,)

    def __init__(self, switch: Any, *, num_experts: int, max_recv_tokens: int) -> None:
        check_buffer(
            switch,
            TOKEN_SWITCH,
            create_routing=("topk_idx", "per_expert_token_counts", "layout"),
            dispatch=("routing", "tokens", "topk_weights", "out"),
            combine=("routing", "expert_tokens", "out"),
        )
        check_integer("num_experts", num_experts, least=1)
        check_integer("max_recv_tokens", max_recv_tokens, least=1)
        self.switch, self.num_experts, self.max_recv_tokens = switch, num_experts, max_recv_tokens

    def check_slots(self, ranks: int, slots_per_rank: int) -> None:
        slots = ranks * slots_per_rank
        if slots != self.num_experts:
            raise ConfigError(
                f"TokenSwitch(num_experts={self.num_experts}), but {ranks} ranks have {slots} "
                f"slots; create the TokenSwitchNCCL for {slots}"
            )

    def begin(self, routes: SlotRoutes) -> _SwitchedRows:
        rows = routes.begins()[-1]
        if rows > self.max_recv_tokens:
            raise LoadError(
                f"a plan with {rows} rows on rank {routes.rank}, but max_recv_tokens is "
                f"{self.max_recv_tokens}: create the TokenSwitchNCCL with a larger number"
            )
        return _SwitchedRows(self, routes, rows)


class _SwitchedRows(LibraryRows):
    """The rows of one microbatch."""

    def __init__(self, dispatcher: TokenSwitch, routes: SlotRoutes, rows: int) -> None:
        self._switch, self._most = dispatcher.switch, dispatcher.max_recv_tokens
        self._rows, self._routes, slots = rows, routes, routes.slots
        self.counts = torch.zeros(routes.slots_per_rank, dtype=torch.int32, device=slots.device)
        self._routing = self._switch.create_routing(slots, self.counts, layout="expert_major")

    def to_slots(self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None) -> Moved:
        if scalars_TK is not None:
            return self._dispatch(values_TD, scalars_TK)
        no_weights = torch.zeros_like(self._routes.slots, dtype=torch.float32)
        return self._dispatch(values_TD, no_weights)[0], None

    def to_tokens(self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None) -> Moved:
        sums_TD = self._combine(rows_AD)
        if scalars_A is None:
            return sums_TD, None
        return sums_TD, self._scalars_to_tokens(scalars_A, rows_AD.dtype)

    def _scalars_to_tokens(self, scalars_A: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return [T, K] the scalar of each choice: rows with one column for each choice."""
        tokens, top_k = self._routes.slots.shape
        parts = PARTS if dtype.itemsize < scalars_A.dtype.itemsize else 1
        width = -(-parts * top_k * dtype.itemsize // ROW_BYTES) * ROW_BYTES // dtype.itemsize
        numbers = torch.arange(top_k, dtype=scalars_A.dtype, device=scalars_A.device)
        empty = torch.zeros(tokens, width, dtype=dtype, device=scalars_A.device)
        _, choices = self._dispatch(empty, numbers.expand(tokens, top_k))
        columns = torch.zeros(len(choices), width, dtype=dtype, device=empty.device)
        left, at = scalars_A[: len(choices)], choices.long()
        for part in range(parts):
            rounded = left.to(dtype)
            columns.scatter_(1, (at + part * top_k)[:, None], rounded[:, None])
            left = left - rounded.to(left.dtype)
        sums = self._combine(columns)[:, : parts * top_k].to(scalars_A.dtype)
        return sums.view(tokens, parts, top_k).sum(dim=1)

    def _dispatch(
        self, values: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = values.new_zeros(self._most, values.shape[1])
        scalars = weights.new_zeros(self._most)
        self._switch.dispatch(
            self._routing, values.contiguous(), weights.contiguous(), out=(rows, scalars, None)
        )
        return rows[: self._rows], scalars[: self._rows]

    def _combine(self, rows: torch.Tensor) -> torch.Tensor:
        sums = rows.new_zeros(len(self._routes.slots), rows.shape[1])
        self._switch.combine(self._routing, rows[: self._rows].contiguous(), out=sums)
        return sums
