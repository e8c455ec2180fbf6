"""Record the experts that the layers of a model choose, and place them in batches.

Shapes: B sequences of S tokens in a batch, T = B * S tokens, L layers, K experts per token, E
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ultraep.arrays import PADDING
from ultraep.errors import ConfigError, LoadError
from ultraep.layer import BalancedMoE
from ultraep.runtime.balancer import Balancer


class RoutedLayer(NamedTuple):
    """A layer of a model whose tokens are routed.

    scope: the module in whose forward the router chooses.
    experts: the module that gets the choices as its second input; None: `scope` returns a Routing.
    """

    name: str
    scope: nn.Module
    experts: nn.Module | None
    num_experts: int
    balancer: Balancer | None
    number: int  # in the balancer


def routed_layers(model: nn.Module) -> list[RoutedLayer]:
    """Return the routed layers of a model, in the order of its modules; raise if it has none."""
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, BalancedMoE):
            balancer, index = module.balancer, module.layer_index
            experts = balancer.topology.experts
            layers.append(RoutedLayer(name, module.router, None, experts, balancer, index))
        elif hasattr(module, "is_concatenated") and hasattr(module, "has_gate"):
            scope = model.get_submodule(name.rpartition(".")[0])
            balanced = getattr(module, "balancer", None)
            experts = module.num_experts if balanced is None else balanced.topology.experts
            index = getattr(module, "layer_index", 0)
            layers.append(RoutedLayer(name, scope, module, experts, balanced, index))
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no routed layers: they are BalancedMoE, or experts in the "
            "registry of transformers"
        )
    return layers


def layer_numbers(model: nn.Module) -> list[int]:
    """Return the number of each routed layer among the layers of the model, from its name."""
    names = [layer.name for layer in routed_layers(model)]
    numbers = [[int(part) for part in name.split(".") if part.isdigit()] for name in names]
    if not all(len(parts) == 1 for parts in numbers):
        raise ConfigError(f"the layer numbers are not in the names {', '.join(names)}")
    return [parts[0] for parts in numbers]


def compact(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Return ids as int8 up to 128 experts, else int16. No expert of the layer becomes -1."""
    ids = ids.masked_fill(ids >= experts, PADDING)  # transformers marks padding like this
    return ids.to(torch.int8 if experts <= 128 else torch.int16)


def at_choice(
    layer: RoutedLayer, choose: Callable[[torch.Tensor], torch.Tensor | None], hooks: ExitStack
) -> None:
    """Call a function with the `[T, K]` ids of every forward pass; it may return other ids."""

    def after_router(_module: Any, _inputs: Any, routing: Any) -> Any:
        ids = choose(routing[0])
        return None if ids is None else type(routing)(ids, *routing[1:])

    def before_experts(_module: Any, inputs: Any, options: Any) -> Any:
        if "top_k_index" in options:
            ids = choose(options["top_k_index"])
            return None if ids is None else (inputs, options | {"top_k_index": ids})
        ids = choose(inputs[1])
        return None if ids is None else ((inputs[0], ids, *inputs[2:]), options)

    if layer.experts is None:
        hooks.callback(layer.scope.register_forward_hook(after_router).remove)
    else:
        handle = layer.experts.register_forward_pre_hook(before_experts, with_kwargs=True)
        hooks.callback(handle.remove)


# Recording.


class Recorder:
    """The ids that the layers of a model chose since recording began."""

    def __init__(self, layers: Sequence[RoutedLayer]) -> None:
        self._layers = layers
        self._shapes: list[tuple[int, int]] = []  # B and S of every forward pass
        self._ids: list[list[torch.Tensor]] = [[] for _ in layers]

    def clear(self) -> None:
        """Forget everything, for the next generation."""
        self._shapes.clear()
        for ids in self._ids:
            ids.clear()

    def routes(self) -> torch.Tensor:
        """Return `[B, S, L, K]` the ids of all tokens that passed the model, padding included."""
        batches = {batch for batch, _ in self._shapes}
        if len(batches) != 1:
            raise LoadError(
                f"{len(self._shapes)} forward passes with batches of {sorted(batches)} sequences "
                "were recorded, but one generation is needed: call clear() before each"
            )
        parts = []
        for layer, recorded in zip(self._layers, self._ids, strict=True):
            if len(recorded) != len(self._shapes):
                raise LoadError(
                    f"{layer.name!r} ran {len(recorded)} times in {len(self._shapes)} forward "
                    "passes: recording needs every token in every layer"
                )
            shaped = [i.view(*s, -1) for i, s in zip(recorded, self._shapes, strict=True)]
            parts.append(torch.cat(shaped, dim=1))
        return torch.stack(parts, dim=2)

    def sequences(self, attention_mask: torch.Tensor) -> list[torch.Tensor]:
        """Return `[tokens, L, K]` the routes of each sequence, on the host.

        attention_mask: `[B, S]`, of prompts and completions. The last token of a completion has
            no routes if it never passed the model.
        """
        routes = self.routes()
        if len(attention_mask) != len(routes) or attention_mask.shape[1] > routes.shape[1] + 1:
            raise LoadError(
                f"the mask is {list(attention_mask.shape)}, but {len(routes)} sequences of "
                f"{routes.shape[1]} tokens were recorded"
            )
        mask = attention_mask[:, : routes.shape[1]].bool().to(routes.device)
        width = mask.shape[1]
        return [own[:width][kept].cpu() for own, kept in zip(routes, mask, strict=True)]

    def _note(self, layer: int, ids: torch.Tensor) -> None:
        self._ids[layer].append(compact(ids.detach(), self._layers[layer].num_experts))


@contextmanager
def record_routes(model: nn.Module) -> Iterator[Recorder]:
    """Record the choices of all routed layers of a model, for one generation in this block.

    Beam search and assisted generation reorder or reject tokens, so their recorded routes do not
    belong to the result.
    """
    layers = routed_layers(model)
    recorder = Recorder(layers)

    def begin(_module: Any, inputs: Any, options: Any) -> None:
        named = (options.get("input_ids"), options.get("inputs_embeds"), *inputs)
        first = next(tensor for tensor in named if isinstance(tensor, torch.Tensor))
        shape = first.shape[:-1] if first.is_floating_point() else first.shape
        recorder._shapes.append((shape[0], shape[1]) if len(shape) > 1 else (1, shape[0]))

    with ExitStack() as hooks:
        handle = model.register_forward_pre_hook(begin, with_kwargs=True)
        hooks.callback(handle.remove)
        for number, layer in enumerate(layers):
            at_choice(layer, partial(recorder._note, number), hooks)
        yield recorder


def from_vllm(routed_experts: Any, layers: Sequence[int]) -> torch.Tensor:
    """Return `[tokens, L, K]` from the `routed_experts` of an output of vLLM.

    Start vLLM with `enable_return_routed_experts=True`. Its ids are logical.
    layers: the routed layers of the model; see `layer_numbers`. vLLM has zeros for dense layers.
    """
    if routed_experts is None:
        raise ConfigError(
            "the output has no routed_experts: start vLLM with enable_return_routed_experts=True"
        )
    if not layers or min(layers) < 0:
        raise LoadError(f"layers must be the numbers of the routed layers, got {list(layers)}")
    routes = torch.from_numpy(routed_experts.astype("int16"))
    if routes.ndim != 3 or max(layers) >= routes.shape[1]:
        raise LoadError(
            f"routed_experts must be [tokens, layers, K] with layer {max(layers)}, got "
            f"{list(routes.shape)}"
        )
    kept = routes[:, list(layers)]
    return kept.to(torch.uint8) if routed_experts.itemsize == 1 else kept


# Batches of recorded routes.


def batch_routes(sequences: Sequence[torch.Tensor], attention_mask: torch.Tensor) -> torch.Tensor:
    """Return `[L, B * S, K]` the routes of a padded batch; -1 where nothing was recorded.

    sequences: `[tokens, L, K]` for each row of the mask; the last token may be missing.
    attention_mask: `[B, S]`; padding may be left or right.
    """
    if attention_mask.ndim != 2 or len(attention_mask) != len(sequences):
        raise LoadError(
            f"{len(sequences)} sequences need a mask [{len(sequences)}, tokens], got "
            f"{list(attention_mask.shape)}"
        )
    flat = attention_mask.cpu().bool()
    positions = [
        row.nonzero().flatten() + number * flat.shape[1] for number, row in enumerate(flat)
    ]
    return _placed(sequences, positions, flat.numel()).to(attention_mask.device)


def packed_routes(sequences: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    """Return `[L, T, K]` the routes of sequences that follow each other in one row.

    lengths: the tokens of each sequence in the row.
    """
    if len(lengths) != len(sequences):
        raise LoadError(f"{len(sequences)} sequences, but {len(lengths)} lengths")
    _check_lengths(sequences, lengths)
    total = sum(lengths)
    return _placed(sequences, list(torch.arange(total).split(list(lengths))), total)


def _placed(
    sequences: Sequence[torch.Tensor], positions: Sequence[torch.Tensor], tokens: int
) -> torch.Tensor:
    """Return `[L, tokens, K]` with each sequence at its positions."""
    _check_lengths(sequences, [len(places) for places in positions])
    placed = torch.full((tokens, *sequences[0].shape[1:]), PADDING, dtype=torch.int32)
    for routes, places in zip(sequences, positions, strict=True):
        placed[places[: len(routes)]] = routes.to(placed)
    return placed.transpose(0, 1).contiguous()


def _check_lengths(sequences: Sequence[torch.Tensor], lengths: Sequence[int]) -> None:
    """Raise unless the sequences are of one model and have the routes of that many tokens."""
    shapes = {tuple(sequence.shape[1:]) for sequence in sequences}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise LoadError(f"routes must be [tokens, layers, K] of one model, got {sorted(shapes)}")
    for number, (routes, tokens) in enumerate(zip(sequences, lengths, strict=True)):
        if tokens < 0 or tokens - len(routes) not in (0, 1):
            raise LoadError(
                f"sequence {number} has {tokens} tokens, but the routes of {len(routes)}: "
                "routes must be those of all tokens, or of all but the last"
            )
