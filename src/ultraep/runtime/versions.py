"""Versions of the weights of a rank: replicas may serve again while the version stays the same.

Torch does not count writes by collectives, by fused optimizers, through `.data`, to tensors created
in inference mode, or by other libraries; and it reuses freed memory. So weights get
a new version in every microbatch, and its replicas serve one forward and backward pass. Inside of
`unchanged` the version of a layer stays, unless torch shows that weights have changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from torch.optim.optimizer import register_optimizer_step_post_hook

from ultraep.bundle import Bundle, Weights, bundle_versions


class _OptimizerSteps:
    """Counts steps of all torch optimizers: fused ones write weights without counting the write."""

    total = 0

    def __call__(self, *_: object) -> None:
        self.total += 1


optimizer_steps = _OptimizerSteps()


@cache
def count_optimizer_steps() -> None:
    """Start to count optimizer steps, for the rest of the process."""
    register_optimizer_step_post_hook(optimizer_steps)


class Versions:
    """The versions of the weights of this rank, by layer. A version is never used twice."""

    def __init__(self) -> None:
        self._last = self._promises = self._promised = 0
        self._steps = optimizer_steps.total
        self._known: dict[int, tuple[Weights, int]] = {}  # weights and version of a layer

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Promise that weights change in this block only by optimizers and before `changed`."""
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
        """Give all layers new versions."""
        self._known.clear()
        self._steps = optimizer_steps.total
        self._promised += 1

    @property
    def promise(self) -> int:
        """The number of the current promise for all layers, or 0."""
        if self._steps != optimizer_steps.total:
            self.changed()
        return self._promised if self._promises else 0

    def of(self, layer: int, bundle: Bundle) -> int:
        """Return the version of these weights in the microbatch that begins."""
        if not self.promise:
            self._last += 1
            return self._last
        weights = bundle_versions(bundle)
        known, version = self._known.get(layer, (None, 0))
        if known != weights:
            self._last += 1
            version = self._last
            self._known[layer] = weights, version
        return version
