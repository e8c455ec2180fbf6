"""Recorded routes: store the experts that a rollout chose, and choose them again in training.

    with record_routes(model) as recorder:
        tokens = model.generate(prompts, attention_mask=mask)
    sequences = recorder.sequences(whole_mask)            # [tokens, layers, K] of each sequence

    with Replay(model) as replay:
        replay.use(batch_routes(sequences, whole_mask))   # the batch that is trained
        model(tokens, attention_mask=whole_mask, labels=labels).loss.backward()

Ids are logical: replicas have none of their own. A rank stores the routes of its own sequences,
and sends them nowhere. Works for `BalancedMoE` and for the experts in the registry of transformers,
balanced or not.
"""

from ultraep.routes.record import (
    Recorder,
    RoutedLayer,
    batch_routes,
    compact,
    from_vllm,
    layer_numbers,
    packed_routes,
    record_routes,
    routed_layers,
)
from ultraep.routes.replay import Replay

__all__ = [
    "Recorder",
    "Replay",
    "RoutedLayer",
    "batch_routes",
    "compact",
    "from_vllm",
    "layer_numbers",
    "packed_routes",
    "record_routes",
    "routed_layers",
]
