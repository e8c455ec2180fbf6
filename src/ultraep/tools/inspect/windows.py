"""One forward pass over all windows, block by block, that records the routing as a trace.

Every block processes one window after another, so its weights are needed once and its activations
hold one window. The model's own forward runs unchanged: the inputs of a block are split by
sequences, and its outputs are concatenated.

A hook before the experts counts the chosen expert ids. The trace has one rank with all experts and
no replicas. `ultraep trace replay --ep 8` and the report divide its tokens over more ranks.

Shapes: N tokens of a window, K experts per token, E experts.
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
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ultraep.config import BalanceConfig
from ultraep.plan import plan
from ultraep.tools.inspect.anatomy import Anatomy
from ultraep.topology import Topology
from ultraep.trace.record import Recorder

UNBALANCED = BalanceConfig(policy="none")
IDS = 1  # index of the ids among the arguments of experts: hidden states, ids, gates

LoadBlock = Callable[[str], AbstractContextManager[None]]


class _LastBlockDone(Exception):
    """The last block that is needed has run."""


def run_windows(
    anatomy: Anatomy,
    windows: Sequence[torch.Tensor],
    load_block: LoadBlock,
    tell: Callable[[str, int], None],
    last: str,
) -> None:
    """Run the decoder up to the block `last`.

    windows: [sequences, T] token ids of each window.
    load_block: a context that holds the weights of a block.
    tell: called with block and window before the block runs.
    """
    sizes = [len(window) for window in windows]

    def in_windows(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outputs = []
        with load_block(name):
            for number, (own_args, own_kwargs) in enumerate(split((args, kwargs), sizes)):
                tell(name, number)
                outputs.append(forward(*own_args, **own_kwargs))
        if name == last:
            raise _LastBlockDone
        return join(outputs)

    with ExitStack() as stack, torch.no_grad():
        for name, block in anatomy.blocks.items():
            block.forward = partial(in_windows, name, block.forward)
            stack.callback(delattr, block, "forward")
        with suppress(_LastBlockDone):
            anatomy.decoder(input_ids=torch.cat(list(windows)), use_cache=False)


def split(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Split the tensors with all sequences into windows; other values are the same for all.

    >>> split({"x": torch.arange(6).reshape(3, 2), "scale": 2.0}, [1, 2])[0]
    {'x': tensor([[0, 1]]), 'scale': 2.0}
    """

    def parts(leaf: Any) -> list[Any]:
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 1 and len(leaf) == sum(sizes):
            return list(leaf.split(list(sizes)))
        return [leaf] * len(sizes)

    leaves, spec = tree_flatten(value)
    by_leaf = [parts(leaf) for leaf in leaves]
    return [tree_unflatten([p[n] for p in by_leaf], spec) for n in range(len(sizes))]


def join(outputs: list[Any]) -> Any:
    """Concatenate the outputs of all windows: the inverse of `split`.

    >>> join([(torch.zeros(1, 2), None), (torch.ones(1, 2), None)])
    (tensor([[0., 0.],
            [1., 1.]]), None)
    """

    def joined(*leaves: Any) -> Any:
        tensors = isinstance(leaves[0], torch.Tensor) and leaves[0].ndim > 1
        return torch.cat(leaves) if tensors else leaves[0]

    return tree_map(joined, *outputs)


class RoutingRecorder:
    """Records the expert ids that routers choose, window by window, as a trace.

    window: number of the window that is running; the caller sets it.
    top_k: experts per token; 0 before the first window.
    """

    def __init__(self, folder: Path, anatomy: Anatomy, topology: Topology, *, note: str) -> None:
        self._anatomy, self._topology = anatomy, topology
        self._recorder = Recorder(folder, topology, UNBALANCED, note=note)
        self.window, self.records, self.top_k = 0, 0, 0

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hook into the experts until the end of the `with`; then the trace is complete."""
        with self._recorder, ExitStack() as stack:
            for layer, experts in self._anatomy.experts.items():
                hook = experts.register_forward_pre_hook(
                    partial(self._record, layer), with_kwargs=True
                )
                stack.callback(hook.remove)
            yield

    @property
    def dropped(self) -> int:
        """Records that were dropped because the disk was too slow."""
        return self._recorder.dropped

    def _record(
        self, layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        ids_NK = (*args, *kwargs.values())[IDS]
        experts, ids = self._topology.experts, ids_NK.reshape(-1)
        ids = ids[(ids >= 0) & (ids < experts)]
        loads_E = torch.bincount(ids, minlength=experts).cpu().numpy()
        unbalanced = plan(loads_E[None], self._topology, UNBALANCED)
        rows = np.concatenate([loads_E, np.zeros(self._topology.slots, dtype=np.int64)])
        self._recorder.add(plan=unbalanced, slot_rows=rows, step=self.window, layer=layer)
        self.records, self.top_k = self.records + 1, ids_NK.shape[-1]
