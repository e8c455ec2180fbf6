"""FlexDispatcher: Megatron-Core's flex token dispatcher (DeepEP, HybridEP), used with slot ids.

Shapes: T local tokens, K experts per token, S slots of all ranks, A arrived rows, D model width.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

from ultraep.dispatch import Received, SlotRoutes
from ultraep.dispatchers.hybridep import check_slots
from ultraep.integrations.common import Overlay


class FlexDispatcher:
    """Moves rows with a flex dispatcher of the library that has one expert for every slot."""

    def __init__(self, config: Any, pg_collection: Any, slots_per_rank: int) -> None:
        ranks, rank = pg_collection.ep.size(), pg_collection.ep.rank()
        self.backend = config.moe_flex_dispatcher_backend
        self._config = Overlay(
            config,
            num_moe_experts=ranks * slots_per_rank,
            # DeepEP sends choices of probability 0 unless there is a capacity.
            moe_expert_capacity_factor=1.0,
            moe_pad_expert_input_to_capacity=False,
            moe_router_padding_for_quantization=False,
            fp8=None,  # experts pad the rows of every slot
        )
        slots = list(range(rank * slots_per_rank, (rank + 1) * slots_per_rank))
        self._library = MoEFlexTokenDispatcher(slots_per_rank, slots, self._config, pg_collection)

    def __repr__(self) -> str:
        return f"FlexDispatcher({self.backend})"  # layers with the same options share a balancer

    def check_slots(self, ranks: int, slots_per_rank: int) -> None:
        if self.backend == "hybridep":
            check_slots(ranks, slots_per_rank)

    def dispatch(
        self, tokens_TD: torch.Tensor, gates_TK: torch.Tensor, routes: SlotRoutes
    ) -> Received:
        """Send every token to its slots; see `Dispatcher`."""
        library = copy(self._library)  # with the handle of this microbatch
        library._comm_manager = copy(library._comm_manager)
        # Padding goes to one more column, which is removed.
        columns = routes.slots.masked_fill(routes.slots < 0, routes.num_slots)
        like = gates_TK.new_zeros(len(gates_TK), routes.num_slots + 1, dtype=torch.float32)
        probs_TS = like.scatter(1, columns, gates_TK.float())[:, :-1]
        chosen_TS = like.bool().scatter(1, columns, True)[:, :-1]
        tokens_TD, _ = library.dispatch_preprocess(tokens_TD, chosen_TS, probs_TS)
        sent, probs = library.token_dispatch(
            tokens_TD, async_finish=False, allocate_on_comm_stream=False
        )
        rows_AD, counts, gates_A = library.dispatch_postprocess(sent, probs)
        return Received(rows_AD, gates_A.to(gates_TK.dtype), counts, state=library)

    def combine(self, outputs_AD: torch.Tensor, received: Received) -> torch.Tensor:
        """Return the `[T, D]` sums of the outputs of each token."""
        library = received.state
        rows = library.combine_preprocess(outputs_AD)
        rows = library.token_combine(rows, async_finish=False, allocate_on_comm_stream=False)
        sums: torch.Tensor = library.combine_postprocess(rows)
        return sums
