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

Shapes: B sequences of S tokens in a batch, T = B * S tokens, L layers, K experts per token, E
experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ultraep.arrays import PADDING
from ultraep.config import check_choice
from ultraep.errors import ConfigError, LoadError
from ultraep.layer import BalancedMoE
from ultraep.runtime.balancer import Balancer

UNKNOWN = ("router", "skip")


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
    """Return ids in the smallest dtype for this number of experts: uint8, else int16."""
    return ids.to(torch.uint8 if experts <= 256 else torch.int16)


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

    Beam search and assisted generation reorder or reject tokens; their routes are not those of the
    result.
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
            _at_choice(layer, partial(recorder._note, number), hooks)
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


# Replaying.


@dataclass(eq=False)
class _ReplayedLayer:
    """One layer, and the ids that it chooses."""

    layer: RoutedLayer
    skips: bool
    ids: torch.Tensor | None = None  # [T, K]; -1: the router decides, or the token is skipped
    checked: bool = False
    modes: list[_Selection] = field(default_factory=list)

    def begin(self, *_: Any) -> None:
        if self.ids is not None:
            mode = _Selection(self.ids, self.layer.num_experts)
            mode.__enter__()  # type: ignore[no-untyped-call]
            self.modes.append(mode)

    def end(self, *_: Any) -> None:
        """Leave the mode; the experts run without it. Idempotent."""
        while self.modes:
            self.modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def choose(self, chosen: torch.Tensor) -> torch.Tensor | None:
        """Return the ids for the experts; raise if the router did not use the recorded ids."""
        ids, selected = self.ids, any(mode.selected for mode in self.modes)
        self.end()
        if ids is None:
            return None
        if chosen.shape != ids.shape:
            raise LoadError(
                f"{self.layer.name!r} routes {list(chosen.shape)} [tokens, K], but the replayed "
                f"routes are {list(ids.shape)}: pass the routes of this batch to use()"
            )
        known = ids >= 0
        if not selected or (not self.checked and not torch.equal(chosen[known], ids[known])):
            raise ConfigError(
                f"the router of {self.layer.name!r} does not choose with torch.topk over "
                f"{self.layer.num_experts} experts, so its routes cannot be replayed"
            )
        self.checked = True
        return chosen.masked_fill(~known, PADDING) if self.skips else None


class Replay:
    """Makes the routers of a model choose recorded experts, while in its `with` block.

    The gates are those of the model's own router at these experts, from its current logits, so
    gradients reach it. Layers that backward recomputes choose the same experts again, until the
    next `use`.

    unknown: tokens without a record, as padding and the last token of a completion. "router": the
        router decides. "skip": no expert computes them, which needs a balanced model.
    """

    def __init__(self, model: nn.Module, *, unknown: str = "router") -> None:
        check_choice("unknown", unknown, UNKNOWN)
        layers = routed_layers(model)
        plain = [layer.name for layer in layers if layer.balancer is None]
        if unknown == "skip" and plain:
            raise ConfigError(f"unknown='skip' needs a balanced model, but {plain[0]!r} is not")
        self._layers = [_ReplayedLayer(layer, unknown == "skip") for layer in layers]
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        for replayed in self._layers:
            scope = replayed.layer.scope
            self._hooks.callback(scope.register_forward_pre_hook(replayed.begin).remove)
            _at_choice(replayed.layer, replayed.choose, self._hooks)
            handle = scope.register_forward_hook(replayed.end, always_call=True)
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self.use(None)
        self._hooks.close()

    def use(self, routes: torch.Tensor | None, *, foresee: bool = False) -> None:
        """Choose these ids in the next forward pass, and whenever it is recomputed.

        routes: `[L, T, K]`; see `batch_routes`. None: the routers decide again.
        foresee: also pass them to `Balancer.foresee`. Collective; needs unknown="skip".
        """
        if routes is not None:
            self._check(routes, foresee)
        for number, replayed in enumerate(self._layers):
            replayed.ids = None if routes is None else routes[number].long()
        if routes is None or not foresee:
            return
        by_balancer: dict[Balancer, list[tuple[int, torch.Tensor]]] = defaultdict(list)
        for replayed, ids in zip(self._layers, routes.long(), strict=True):
            assert replayed.layer.balancer is not None
            by_balancer[replayed.layer.balancer].append((replayed.layer.number, ids))
        for balancer, layers in by_balancer.items():
            balancer.foresee([ids for _, ids in sorted(layers, key=lambda pair: pair[0])])

    def _check(self, routes: torch.Tensor, foresee: bool) -> None:
        if routes.ndim != 3 or len(routes) != len(self._layers):
            raise LoadError(
                f"the routes must be [{len(self._layers)} layers, tokens, K], got "
                f"{list(routes.shape)}; see batch_routes"
            )
        if foresee and not all(replayed.skips for replayed in self._layers):
            raise ConfigError("foresee=True needs Replay(model, unknown='skip'): all ids are known")
        if routes.numel():
            least, most = (int(number) for number in routes.aminmax())
            experts = min(replayed.layer.num_experts for replayed in self._layers)
            if least < PADDING or most >= experts:
                raise LoadError(f"ids lie in {least}..{most}, but must lie in -1..{experts - 1}")


class _Selection(TorchFunctionMode):
    """Makes a top-k over experts return the given ids, with their scores."""

    def __init__(self, ids: torch.Tensor, experts: int) -> None:
        super().__init__()
        self._ids, self._experts, self.selected = ids, experts, False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores, (_, own) = args[0], result
        if own.numel() != self._ids.numel() or scores.shape[-1] != self._experts:
            return result
        self.selected = True
        ids = self._ids.view(own.shape)
        chosen = torch.where(ids >= 0, ids, own)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def _at_choice(
    layer: RoutedLayer,
    choose: Callable[[torch.Tensor], torch.Tensor | None],
    hooks: ExitStack,
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
