"""One forward pass over all windows, block by block, in which the routing becomes a trace.

Every block takes one window after the other, so its weights are needed once, and its activations
are those of one window. The model's own forward runs as it is: the inputs of a block are split by
sequences, and its outputs are joined again.

All modules of experts in transformers' registry are called with hidden states, the ids that the
router chose, and gates. A hook before that call counts the ids; the model does not change. The
trace is that of one rank with all experts and no copies. `ultraep trace replay --ep 8` and the
report deal its tokens out to more ranks.

Shapes: N tokens of a window, K choices of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ultraep.config import BalanceConfig
from ultraep.plan import plan
from ultraep.tools.inspect.anatomy import Anatomy
from ultraep.topology import Topology
from ultraep.trace.record import Recorder

PLAIN = BalanceConfig(policy="none")
IDS = 1  # place of the ids in a call of experts: hidden states, ids, gates

Lend = Callable[[str], AbstractContextManager[None]]
Tell = Callable[[str, int], None]


class _Enough(Exception):
    """The last block that is needed has run."""


def run_windows(
    anatomy: Anatomy, windows: Sequence[torch.Tensor], lend: Lend, tell: Tell, until: str
) -> None:
    """Run the decoder up to the block `until`.

    windows: [sequences, T] token ids of each.
    lend: the weights of a block, for the time of a `with`.
    tell: called with block and window before the block runs.
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
    """The outputs of all windows as one: the opposite of `split`.

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


# -- recording -----------------------------------------------------------------------------------


class Catcher:
    """Records the choices of the routers of some layers, window by window.

    window: the number of the window that goes through the model; the caller sets it.
    top_k: choices of a token; 0 before the first window.
    """

    def __init__(self, folder: Path, anatomy: Anatomy, topology: Topology, *, note: str) -> None:
        self._anatomy, self._topology = anatomy, topology
        self._recorder = Recorder(folder, topology, PLAIN, note=note)
        self.window, self.records, self.top_k = 0, 0, 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hook into the experts until the end of the `with`; then the trace is complete."""
        with self._recorder, ExitStack() as stack:
            for layer, experts in self._anatomy.experts.items():
                hook = experts.register_forward_pre_hook(self._hook(layer), with_kwargs=True)
                stack.callback(hook.remove)
            yield

    @property
    def dropped(self) -> int:
        """Records that were lost because the disk was too slow."""
        return self._recorder.dropped

    def _hook(self, layer: int) -> Any:
        def caught(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._add(layer, (*args, *kwargs.values())[IDS])

        return caught

    def _add(self, layer: int, ids_NK: torch.Tensor) -> None:
        experts, chosen = self._topology.experts, ids_NK.reshape(-1)
        chosen = chosen[(chosen >= 0) & (chosen < experts)]
        loads_E = torch.bincount(chosen, minlength=experts).cpu().numpy()
        unbalanced = plan(loads_E[None], self._topology, PLAIN)
        rows = np.concatenate([loads_E, np.zeros(self._topology.slots, dtype=np.int64)])
        self._recorder.add(plan=unbalanced, slot_rows=rows, step=self.window, layer=layer)
        self.records, self.top_k = self.records + 1, ids_NK.shape[-1]
