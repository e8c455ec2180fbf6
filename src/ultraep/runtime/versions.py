"""Whether copies of weights may serve again: a number that stays only where that is promised.

Torch does not count every write: not those of collectives, through `.data`, to tensors made in
inference mode, or by other libraries; and memory that was freed is used again. So weights get a
new number in every microbatch, and its copies serve its own forward and backward pass. Inside of
`unchanged` the number of a layer stays, unless torch itself knows that the promise is broken.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch


class _Seen(NamedTuple):
    """A tensor as it was; another one in the same memory is not taken for it."""

    tensor: weakref.ref[torch.Tensor]
    address: int
    writes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Seen:
        return cls(weakref.ref(tensor), tensor.data_ptr(), _writes(tensor))

    def is_still(self, tensor: torch.Tensor) -> bool:
        same = self.tensor() is tensor and self.address == tensor.data_ptr()
        return same and self.writes == _writes(tensor)


def _writes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Known(NamedTuple):
    """The weights of a layer, and the number they have."""

    seen: list[_Seen]
    number: int

    def still(self, tensors: Sequence[torch.Tensor]) -> bool:
        return len(self.seen) == len(tensors) and all(
            seen.is_still(tensor) for seen, tensor in zip(self.seen, tensors, strict=True)
        )


class Versions:
    """The numbers of the weights of this rank, by layer. None is ever used for other weights."""

    def __init__(self) -> None:
        self._last = self._promises = self._promised = 0
        self._known: dict[int, _Known] = {}

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Weights do not change in this block, but for what `changed` tells."""
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
        self._promised += 1

    @property
    def promise(self) -> int:
        """The number of the promise that holds now, for all layers; 0: there is none."""
        return self._promised if self._promises else 0

    def of(self, layer: int, tensors: Sequence[torch.Tensor]) -> int:
        """The number of these weights in the microbatch that begins."""
        if layer in self._known and self._known[layer].still(tensors):
            return self._known[layer].number
        self._last += 1
        if self._promises:
            self._known[layer] = _Known([_Seen.of(tensor) for tensor in tensors], self._last)
        return self._last
