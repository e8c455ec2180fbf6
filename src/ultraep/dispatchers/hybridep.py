"""Rows through HybridEP, of DeepEP's branch `hybrid-ep`: RDMA once per node, NVLink inside.

    buffer = deep_ep.HybridEPBuffer(group, hidden_dim=4096, max_num_of_tokens_per_rank=4096,
                                    num_local_experts=128 // 8 + 2)
    balancer = Balancer(group, experts=128, slots=2, dispatcher=HybridEP(buffer, tokens=4096))

The library takes a dense map of tokens and experts, so a token can have each slot once. Handles are
passed on as they are: their fields differ between versions.

Shapes: T tokens, K experts per token, A arrived rows, S slots of all ranks, D model width.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.nn.functional import pad

from ultraep.config import check_integer
from ultraep.dispatch import Moved, SlotRoutes
from ultraep.dispatchers import LibraryRows, RawDispatcher, check_buffer
from ultraep.errors import ConfigError
from ultraep.supported import HYBRID_BUFFER

CHUNK = 16  # tokens; the library needs multiples


class HybridEP(RawDispatcher):
    """Moves rows with a `deep_ep.HybridEPBuffer`.

    buffer: for the group of the balancer.
    tokens: the most tokens of a rank in a microbatch, a multiple of 16, the same on all ranks.
        Smaller microbatches are padded, because the library needs equal numbers on all ranks.
    """

    dtypes, width_multiple, ordered = (torch.bfloat16,), 16, True

    def __init__(self, buffer: Any, *, tokens: int) -> None:
        routing = ("routing_map", "probs", "scaling_factor", "num_permuted_tokens", "use_fp8")
        check_buffer(
            buffer,
            HYBRID_BUFFER,
            dispatch_with_permute=("hidden", "num_of_experts_per_rank", "handle", *routing),
            combine_with_unpermute=("hidden", "probs", "handle"),
        )
        check_integer("tokens", tokens, least=1)
        if tokens % CHUNK:
            raise ConfigError(f"tokens= must be a multiple of {CHUNK}, got {tokens}")
        if _is_for_fp8(buffer):
            raise ConfigError(
                "HybridEP sends bfloat16 gradients, which overrun a buffer for FP8 rows: create "
                "the HybridEPBuffer with use_fp8=False"
            )
        self.buffer, self.max_tokens = buffer, tokens

    def check_slots(self, ranks: int, slots_per_rank: int) -> None:  # noqa: ARG002
        check_slots(self.buffer.num_of_hybrid_ep_ranks_per_nvlink_domain, slots_per_rank)

    def begin(self, routes: SlotRoutes) -> _PermutedRows:
        return _PermutedRows(self, routes, self.max_tokens or 0)


def _is_for_fp8(buffer: Any) -> bool:
    config = getattr(getattr(buffer, "configurer", None), "buffer_config", None)
    as_bytes = "UINT8" in str(getattr(config, "token_data_type", ""))
    return as_bytes or getattr(buffer, "use_fp8", False)  # the latter in older versions


def ranks_of_domain(ranks: int) -> int:
    """Return the ranks of an NVLink domain, before a buffer has detected them."""
    names = ("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "LOCAL_WORLD_SIZE")
    known = [int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()]
    return min([*known[:1], ranks])


def check_slots(ranks: int, slots_per_rank: int) -> None:
    """Raise unless the gates of a token, of these ranks of an NVLink domain, fill 16-byte words."""
    if ranks * slots_per_rank % 4:
        raise ConfigError(
            f"HybridEP needs a multiple of 4 slots in an NVLink domain, got {ranks} ranks x "
            f"{slots_per_rank} slots; change slots= of the balancer"
        )


class _PermutedRows(LibraryRows):
    """The rows of one microbatch."""

    def __init__(self, dispatcher: HybridEP, routes: SlotRoutes, tokens: int) -> None:
        self._buffer, self._routes, self._handle = dispatcher.buffer, routes, None
        self._missing = tokens - len(routes.slots)  # tokens to be padded

    def to_slots(self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None) -> Moved:
        if self._handle is None:
            chosen = torch.ones_like(self._routes.slots, dtype=torch.bool)
            known: dict[str, Any] = {"routing_map": self._dense(chosen)}
        else:
            known = {"handle": self._handle, "num_permuted_tokens": sum(self.counts)}
        rows_AD, scalars_A, _, counts, handle = self._buffer.dispatch_with_permute(
            hidden=pad(values_TD, (0, 0, 0, self._missing)).contiguous(),
            probs=None if scalars_TK is None else self._dense(scalars_TK),
            num_of_experts_per_rank=self._routes.slots_per_rank,
            use_fp8=False,
            **known,
        )
        if self._handle is None:
            self._handle, self.counts = handle, counts.tolist()
        return rows_AD, scalars_A

    def to_tokens(self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None) -> Moved:
        probs = None if scalars_A is None else scalars_A.contiguous()
        sums, dense, *_ = self._buffer.combine_with_unpermute(
            hidden=rows_AD.contiguous(), probs=probs, handle=self._handle
        )
        slots = self._routes.slots
        if scalars_A is None:
            return sums[: len(slots)], None
        scalars_TK = dense[: len(slots)].gather(1, slots.clamp(min=0))
        return sums[: len(slots)], scalars_TK.masked_fill(slots < 0, 0)

    def _dense(self, choices_TK: torch.Tensor) -> torch.Tensor:
        """Return [tokens, S] a value for each slot of a token, zero elsewhere."""
        slots, num_slots = self._routes.slots, self._routes.num_slots
        dense = choices_TK.new_zeros(len(slots) + self._missing, num_slots + 1)
        columns = slots.masked_fill(slots < 0, num_slots)  # padding goes to a column of its own
        dense[: len(slots)].scatter_(1, columns, choices_TK)
        return dense[:, :num_slots].contiguous()
