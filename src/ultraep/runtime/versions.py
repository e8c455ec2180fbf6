"""Whether replicas may serve again: a number that stays the same only where that is promised.

Torch does not count every write: not the writes of collectives and of fused optimizers, through
`.data`, to tensors made in inference mode, or by other libraries; and freed memory is used again.
So weights get a new number in every microbatch, and its replicas serve one forward and backward
pass. Inside `unchanged` the number of a layer stays, unless torch knows that the promise is broken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

from torch.optim.optimizer import register_optimizer_step_post_hook

from ultraep.bundle import Bundle, Weights, bundle_versions


class _OptimizerSteps:
    """Steps of all optimizers of torch: fused ones write weights without counting the write."""

    total = 0

    def __call__(self, *_: object) -> None:
        self.total += 1


optimizer_steps = _OptimizerSteps()


@cache
def count_optimizer_steps() -> None:
    """Begin to count, for the rest of the process."""
    register_optimizer_step_post_hook(optimizer_steps)


class _Known(NamedTuple):
    """The weights of a layer, and their number."""

    weights: Weights
    number: int


class Versions:
    """The numbers of the weights of this rank, by layer. None is ever used for other weights."""

    def __init__(self) -> None:
        self._last = self._promises = self._promised = 0
        self._steps = optimizer_steps.total
        self._known: dict[int, _Known] = {}

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Weights do not change in this block, except by optimizers and before `changed`."""
        count_optimizer_steps()
        self._promises += 1
        self._promised += self._promises == 1
        try:
            yield
        finally:
            self._promises -= 1
            if not self._promises:
                self.changed()

    def changed(self) -> None:
        """Weights have changed: all layers get new numbers."""
        self._known.clear()
        self._steps = optimizer_steps.total
        self._promised += 1

    @property
    def promise(self) -> int:
        """The number of the promise that holds now, for all layers; 0: there is none."""
        if self._steps != optimizer_steps.total:
            self.changed()
        return self._promised if self._promises else 0

    def of(self, layer: int, bundle: Bundle) -> int:
        """Return the number of these weights in the microbatch that begins."""
        if not self.promise:
            self._last += 1
            return self._last
        weights, known = bundle_versions(bundle), self._known.get(layer)
        if known is None or known.weights != weights:
            self._last += 1
            known = self._known[layer] = _Known(weights, self._last)
        return known.number
