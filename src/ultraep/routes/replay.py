"""Make the routers of a model choose recorded experts.

Shapes: T tokens, L layers, K experts per token.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ultraep.arrays import PADDING
from ultraep.config import check_choice
from ultraep.errors import ConfigError, LoadError
from ultraep.routes.record import RoutedLayer, at_choice, routed_layers

UNKNOWN = ("router", "skip")


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

    The model's own router computes the gates of these experts from its current logits, so
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
            at_choice(replayed.layer, replayed.choose, self._hooks)
            handle = scope.register_forward_hook(replayed.end, always_call=True)
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self.use(None)
        self._hooks.close()

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
