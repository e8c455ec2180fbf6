"""One forward pass over all windows, in which every block takes one window after the other.

So the weights of a block are needed once, and what a block needs in between is that of one window.
The model's own forward runs as it is: what it hands to a block is split by sequences, what the
block returns is put together again.

Shapes: B sequences of all windows, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from ultraep.tools.inspect.anatomy import Anatomy

Lend = Callable[[str], AbstractContextManager[None]]
Tell = Callable[[str, int], None]


class _Enough(Exception):
    """The last block that was asked for is through."""


def run_windows(
    anatomy: Anatomy, windows: Sequence[torch.Tensor], lend: Lend, tell: Tell, until: str
) -> None:
    """Run the decoder up to the block `until`.

    windows: [sequences, T] token ids of each.
    lend: the weights of a block, for the time of a `with`.
    tell: hears which block takes which window, before it does.
    """
    sizes = [len(window) for window in windows]

    def in_windows(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parts = []
        with lend(name):
            for number, (own, named) in enumerate(split((args, kwargs), sizes)):
                tell(name, number)
                parts.append(forward(*own, **named))
        if name == until:
            raise _Enough
        return joined(parts)

    with ExitStack() as stack, torch.no_grad():
        for name, block in anatomy.blocks.items():
            stack.enter_context(_replaced(block, partial(in_windows, name, block.forward)))
        with suppress(_Enough):
            anatomy.decoder(input_ids=torch.cat(list(windows)), use_cache=False)


@contextmanager
def _replaced(block: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    block.forward = forward
    try:
        yield
    finally:
        del block.forward


def split(value: Any, sizes: Sequence[int]) -> list[Any]:
    """The value for every window: tensors of all sequences are cut, the rest is the same for all.

    >>> split({"x": torch.arange(6).reshape(3, 2), "scale": 2.0}, [1, 2])[0]
    {'x': tensor([[0, 1]]), 'scale': 2.0}
    """
    if isinstance(value, torch.Tensor) and value.ndim > 1 and len(value) == sum(sizes):
        return list(value.split(list(sizes)))
    if isinstance(value, (tuple, list)):
        return [type(value)(parts) for parts in _turned([split(v, sizes) for v in value], sizes)]
    if isinstance(value, dict):
        rows = _turned([split(v, sizes) for v in value.values()], sizes)
        return [dict(zip(value, parts, strict=True)) for parts in rows]
    return [value] * len(sizes)


def _turned(columns: list[list[Any]], sizes: Sequence[int]) -> list[list[Any]]:
    return [[column[number] for column in columns] for number in range(len(sizes))]


def joined(parts: list[Any]) -> Any:
    """What all windows returned, as one: the opposite of `split`.

    >>> joined([(torch.zeros(1, 2), None), (torch.ones(1, 2), None)])
    (tensor([[0., 0.],
            [1., 1.]]), None)
    """
    first = parts[0]
    if isinstance(first, torch.Tensor) and first.ndim > 1:
        return torch.cat(parts)
    if isinstance(first, (tuple, list)):
        return type(first)(joined(list(column)) for column in zip(*parts, strict=True))
    return first
