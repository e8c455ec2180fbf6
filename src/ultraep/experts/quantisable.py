"""A module of home experts whose weights may be quantised: in full at home, or in eight bits alone.

In full, they learn, and are quantised anew in every microbatch, unless it is promised that they
have not changed. In eight bits alone, as a checkpoint has them, they do not learn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

import ultraep.ops.formats as formats
from ultraep.backends import backend_for
from ultraep.ops.formats import Format, format_named
from ultraep.ops.quantised import WEIGHTS, QuantisedWeights, check_quantised
from ultraep.parallel.home import HomeModule

NAMES = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
NUMBERS = (*WEIGHTS, *WEIGHTS.values())


class QuantisableModule(HomeModule):
    """Weights `gate_up_proj` and `down_proj`, stacked over home experts; perhaps biases."""

    form: Format | None = None
    _made: QuantisedWeights | None = None  # of weights in full

    def _quantise_as(self, name: str | None) -> None:
        self.form = None if name is None else format_named(name)
        self._made = None if self.form is None else QuantisedWeights(self.form)

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hold weights in eight bits alone."""
        assert self.form is not None
        check_quantised(self.form, tensors, len(self.home_experts))
        self._made = None
        for name in NUMBERS:
            held = nn.Parameter(tensors[name].detach(), requires_grad=False)
            self.register_parameter(name, held)

    @property
    def bundle(self) -> dict[str, torch.Tensor]:
        """What a copy of an expert consists of."""
        return self.current_bundle(0)

    def current_bundle(self, promise: int) -> dict[str, torch.Tensor]:
        """That of the weights as they are now.   promise: see `Balancer.weights_promise`."""
        own = self._own()
        if self._made is not None:
            full = {name: own[name] for name in WEIGHTS}
            self._made.refresh(full, _numbers(own["down_proj"].device), promise)
        return own | self._eight_bits()

    def _own(self) -> dict[str, torch.Tensor]:
        """Weights and biases that there are."""
        found = ((name, getattr(self, name)) for name in NAMES)
        return {name: weight for name, weight in found if weight is not None}

    def _eight_bits(self) -> dict[str, torch.Tensor]:
        """Numbers and scales, if weights are quantised."""
        if self._made is not None:
            return self._made.tensors()
        names = () if self.form is None else NUMBERS
        return {name: getattr(self, name).detach() for name in names}

    @property
    def pack(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What makes rows of bytes of those that travel; None: they travel as they are."""
        form = self.form
        if form is None or not form.packs:
            return None
        return lambda rows: _numbers(rows.device).pack(form, rows)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> HomeModule:
        """As any module, but numbers of eight bits and their scales keep their types."""
        alone = self.form is not None and self._made is None
        kept = [getattr(self, name) for name in NUMBERS] if alone else []

        def apply(tensor: torch.Tensor) -> Any:
            if not any(tensor is one for one in kept):
                return fn(tensor)
            return fn(tensor.view(torch.uint8)).view(tensor.dtype)

        return super()._apply(apply, recurse)


def _numbers(device: torch.device) -> ModuleType:
    """Who quantises there: the kernels of a GPU, if they are installed, or their twins."""
    if device.type == "cpu" or backend_for(device.type).name != "triton":
        return formats
    from ultraep.backends.triton import quantise

    return quantise
