"""Make the routers of a model choose recorded experts.

Shapes: T tokens, L layers, K experts per token.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ultraep.arrays import PADDING
from ultraep.config import check_choice
from ultraep.errors import ConfigError, LoadError
from ultraep.ops.modes import outside_dispatch_modes
from ultraep.replicas import NO_PASS, backward_pass
from ultraep.routes.record import RoutedLayer, at_choice, routed_layers

UNKNOWN = ("router", "skip")
MOST_PASSES = 64  # of a layer that wait for backward
UNLIKE = 0.01  # by which scores of a recomputed pass may change, because it rounds differently


@dataclass(eq=False)
class _Pass:
    """A forward pass that backward may recompute.

    scores: [T, K] of the router's own choice, by which backward recognises the pass.
    ids: [T, K] that were chosen; None: the choice of the router.
    """

    scores: torch.Tensor
    ids: torch.Tensor | None
    recomputed: bool = False


@dataclass(eq=False)
class _ReplayedLayer:
    """One layer, and the ids that it chooses."""

    layer: RoutedLayer
    skips: bool
    ids: torch.Tensor | None = None  # [T, K]; -1: the router decides, or the token is skipped
    checked: bool = False
    mode: _Selection | None = None
    passes: list[_Pass] = field(default_factory=list)
    ended: bool = False  # whether the block is left; passes of it may still be recomputed
    hooks: ExitStack = field(default_factory=ExitStack)

    def enter(self) -> None:
        scope = self.layer.scope
        earlier = _replayed.get(scope)
        if earlier is not None and earlier.ended:
            self.passes = earlier.passes
            earlier.hooks.close()
        _replayed[scope] = self
        self.hooks.callback(scope.register_forward_pre_hook(self.begin).remove)
        at_choice(self.layer, self.choose, self.hooks)
        handle = scope.register_forward_hook(self.end, always_call=True)
        self.hooks.callback(handle.remove)

    def leave(self) -> None:
        """Remove the hooks, unless backward has yet to recompute a pass of the block."""
        self.ids, self.ended = None, True
        if all(one.recomputed or one.ids is None for one in self.passes):
            self.hooks.close()
            self.passes.clear()

    def begin(self, *_: Any) -> None:
        self.end()
        if self.ended and backward_pass() == NO_PASS:
            self.leave()
            if not self.passes:
                return
        self.mode = _Selection(self)
        self.mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self, *_: Any) -> None:
        """Leave the mode; the experts run without it. Idempotent."""
        if self.mode is not None:
            self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.mode = None

    @outside_dispatch_modes
    def ids_of_pass(self, scores: torch.Tensor) -> torch.Tensor | None:
        """Return the ids of the pass that runs now; scores: of the router's own choice."""
        scores = scores.detach()
        if backward_pass() == NO_PASS:
            if _in_checkpoint():
                waiting = [one for one in self.passes if not one.recomputed]
                self.passes = [*waiting[1 - MOST_PASSES :], _Pass(scores, self.ids)]
            return self.ids
        known = [one for one in self.passes if one.scores.shape == scores.shape]
        distances = [float((one.scores - scores).abs().sum()) for one in known]
        least = min([*distances, UNLIKE * float(scores.abs().sum())])
        likely = [one for one, d in zip(known, distances, strict=True) if d == least]
        if likely and all(_same(likely[0].ids, one.ids) for one in likely):
            likely[0].recomputed = True
            return likely[0].ids
        if self.ended and not likely:
            return None  # it ran before or after the block
        raise ConfigError(
            f"backward recomputes a pass of {self.layer.name!r} whose routes Replay does not know: "
            "run forward and backward of a batch inside one `with Replay(...)` block"
        )

    @outside_dispatch_modes
    def choose(self, chosen: torch.Tensor) -> torch.Tensor | None:
        """Return the ids for the experts; raise if the router did not use the recorded ids."""
        mode = self.mode
        self.end()
        used = mode is not None and mode.selected
        ids = mode.ids if mode is not None and used else self.ids
        if ids is None:
            return None
        if chosen.shape != ids.shape:
            raise LoadError(
                f"{self.layer.name!r} routes {list(chosen.shape)} [tokens, K], but the replayed "
                f"routes are {list(ids.shape)}: pass the routes of this batch to use()"
            )
        known = ids >= 0
        if not used or (not self.checked and not torch.equal(chosen[known], ids[known])):
            raise ConfigError(
                f"the router of {self.layer.name!r} does not choose with torch.topk over "
                f"{self.layer.num_experts} experts, so its routes cannot be replayed"
            )
        self.checked = True
        return chosen.masked_fill(~known, PADDING) if self.skips else None


# The last replay of each layer, for passes that are recomputed after its block.
_replayed: WeakKeyDictionary[nn.Module, _ReplayedLayer] = WeakKeyDictionary()


def _same(ids: torch.Tensor | None, others: torch.Tensor | None) -> bool:
    return ids is others or (ids is not None and others is not None and torch.equal(ids, others))


def _in_checkpoint() -> bool:
    """Return whether activation checkpointing may recompute the ops that run now."""
    if torch.is_grad_enabled():  # use_reentrant=False
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    # Forward-mode differentiation is off inside an autograd function: use_reentrant=True.
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


class Replay:
    """Makes the routers of a model choose recorded experts, while in its `with` block.

    The model's own router computes the gates of these experts from its current logits, so
    gradients reach it. Layers that backward recomputes choose the same experts again, also after
    the next `use` or after the block.

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

    def __enter__(self) -> Self:
        for replayed in self._layers:
            replayed.enter()
        return self

    def __exit__(self, *error: object) -> None:
        for replayed in self._layers:
            replayed.leave()

    def use(self, routes: torch.Tensor | None) -> None:
        """Choose these ids in the next forward pass, and whenever it is recomputed.

        routes: `[L, T, K]`; see `batch_routes`. None: the routers decide again.
        """
        if routes is not None:
            self._check(routes)
        for number, replayed in enumerate(self._layers):
            replayed.ids = None if routes is None else routes[number].long()

    def _check(self, routes: torch.Tensor) -> None:
        if routes.ndim != 3 or len(routes) != len(self._layers):
            raise LoadError(
                f"the routes must be [{len(self._layers)} layers, tokens, K], got "
                f"{list(routes.shape)}; see batch_routes"
            )
        if routes.numel():
            least, most = (int(number) for number in routes.aminmax())
            experts = min(replayed.layer.num_experts for replayed in self._layers)
            if least < PADDING or most >= experts:
                raise LoadError(f"ids lie in {least}..{most}, but must lie in -1..{experts - 1}")


class _Selection(TorchFunctionMode):
    """Makes a top-k over experts return the ids of the pass, with their scores."""

    def __init__(self, layer: _ReplayedLayer) -> None:
        super().__init__()
        self._layer, self.selected = layer, False
        self.ids: torch.Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores, (best, own) = args[0], result
        if scores.shape[-1] != self._layer.layer.num_experts:
            return result
        ids = self._layer.ids_of_pass(best)
        if ids is not None and ids.numel() != own.numel():
            return result
        self.selected, self.ids = True, ids
        if ids is None:
            return result
        ids = ids.view(own.shape)
        chosen = torch.where(ids >= 0, ids, own)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
