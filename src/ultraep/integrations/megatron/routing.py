"""What a router of Megatron-Core decides, as ids and gates. Plain torch, without Megatron-Core.

Shapes: T local tokens, K experts per token, E experts.
"""

from __future__ import annotations

import torch

from ultraep.arrays import PADDING
from ultraep.routing import Routing


def choices(probs_TE: torch.Tensor, map_TE: torch.Tensor, top_k: int, *, padded: bool) -> Routing:
    """Ids and gates `[T, K]` of dense maps `[T, E]`; fewer choices are filled up with padding.

    padded: the map also has tokens that only fill an expert up to its capacity. They did not choose
    it, their probability is 0, and they add nothing: they are left out.
    """
    chosen = probs_TE.detach().masked_fill(~map_TE, -1)
    if padded:
        chosen = chosen.masked_fill(chosen == 0, -1)
    best, ids = chosen.topk(min(top_k, probs_TE.shape[1]), dim=1)
    gates = probs_TE.gather(1, ids)
    return Routing(ids.masked_fill(best < 0, PADDING), gates, None)
