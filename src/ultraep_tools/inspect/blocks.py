"""Blocks: the blocks and experts of a model, run window by window.

Experts are modules in transformers' registry. All of them are called with hidden states, the
chosen expert ids, and gates. Blocks are the members of the outermost module list around the
experts: the decoder layers.

Every block processes one window after another, so its weights are needed once and its activations
hold one window. The model's own forward runs unchanged: the inputs of a block are split by
sequences, and its outputs are concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ultraep.errors import ConfigError

MARK = "is_concatenated"  # the registry sets it on every module of experts
OUTSIDE = ""  # in place of a block name: the modules outside of all blocks

LoadBlock = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The decoder of a model, its blocks by name, and its experts and their blocks by layer."""

    decoder: nn.Module  # takes token ids
    prefix: str  # of the names in the decoder
    blocks: dict[str, nn.Module]
    experts: dict[int, nn.Module]
    block_of_layer: dict[int, str]

    @classmethod
    def of(cls, model: Any) -> Anatomy:
        """Find the blocks and experts; raise for a model without experts of the registry."""
        decoder = model.get_decoder()
        name = next(name for name, module in model.named_modules() if module is decoder)
        prefix = f"{name}." if name else ""
        names = [prefix + name for name, module in decoder.named_modules() if hasattr(module, MARK)]
        lists = {_outermost_list(model, name) for name in names}
        if not names or None in lists:
            raise ConfigError(
                f"{type(model).__name__} has no experts of transformers' registry; inspect a "
                "Mixture-of-Experts model whose experts are in the registry"
            )
        blocks = {
            f"{part}.{number}": block
            for part in sorted(filter(None, lists))
            for number, block in enumerate(model.get_submodule(part))
        }
        block_of = [next(b for b in blocks if name.startswith(f"{b}.")) for name in names]
        # Layers are numbered like blocks, unless a block has several modules of experts.
        layers = [list(blocks).index(block) for block in block_of]
        if len(set(layers)) < len(layers):
            layers = list(range(len(layers)))
        experts = dict(zip(layers, map(model.get_submodule, names), strict=True))
        return cls(decoder, prefix, blocks, experts, dict(zip(layers, block_of, strict=True)))

    def only(self, layers: Collection[int]) -> Anatomy:
        experts = {layer: self.experts[layer] for layer in layers}
        blocks = {layer: self.block_of_layer[layer] for layer in layers}
        return replace(self, experts=experts, block_of_layer=blocks)


def num_experts(module: nn.Module) -> int:
    """Number of experts in a module of the registry: the length of each of its weights."""
    return len(next(module.parameters()))


def _outermost_list(model: nn.Module, name: str) -> str | None:
    parts = name.split(".")
    paths = [".".join(parts[:end]) for end in range(1, len(parts))]
    return next((p for p in paths if isinstance(model.get_submodule(p), nn.ModuleList)), None)


# -- windows -------------------------------------------------------------------------------------


class _LastBlockDone(Exception):
    """The last block that is needed has run."""


def run_windows(
    anatomy: Anatomy,
    windows: Sequence[torch.Tensor],
    load_block: LoadBlock,
    before_block: Callable[[str, int], None],
    last: str,
) -> None:
    """Run the decoder up to the block `last`.

    windows: [sequences, T] token ids of each window.
    load_block: a context that holds the weights of a block, or of the modules OUTSIDE.
    before_block: called with block and window before the block runs.
    """
    sizes = [len(window) for window in windows]

    def in_windows(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outputs = []
        with load_block(name):
            for number, (own_args, own_kwargs) in enumerate(split((args, kwargs), sizes)):
                before_block(name, number)
                outputs.append(forward(*own_args, **own_kwargs))
        if name == last:
            raise _LastBlockDone
        return join(outputs)

    with ExitStack() as stack, torch.no_grad():
        for name, block in anatomy.blocks.items():
            block.forward = partial(in_windows, name, block.forward)
            stack.callback(delattr, block, "forward")
        with load_block(OUTSIDE), suppress(_LastBlockDone):
            anatomy.decoder(input_ids=torch.cat(list(windows)), use_cache=False)


def split(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Split the tensors with all sequences into windows; other values are the same for all.

    >>> split({"x": torch.arange(6).reshape(3, 2), "shared": torch.zeros(1, 3), "n": 2}, [1, 2])[0]
    {'x': tensor([[0, 1]]), 'shared': tensor([[0., 0., 0.]]), 'n': 2}
    """

    def rows(begin: int, end: int, leaf: Any) -> Any:
        whole = isinstance(leaf, torch.Tensor) and leaf.ndim > 1 and len(leaf) == sum(sizes)
        return leaf[begin:end] if whole else leaf

    ends = list(accumulate(sizes, initial=0))
    return [tree_map(partial(rows, *span), value) for span in pairwise(ends)]


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
