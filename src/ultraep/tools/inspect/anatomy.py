"""Anatomy: the blocks and the experts of a model.

Experts are modules in transformers' registry. All of them are called with hidden states, the
chosen expert ids, and gates. Blocks are the members of the outermost module list around the
experts: the decoder layers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from ultraep.errors import ConfigError

MARK = "is_concatenated"  # the registry sets it on every module of experts


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The decoder of a model, its blocks by name, and its experts and their blocks by layer."""

    decoder: nn.Module  # takes token ids
    blocks: dict[str, nn.Module]
    experts: dict[int, nn.Module]
    block_of_layer: dict[int, str]

    @classmethod
    def of(cls, model: Any) -> Anatomy:
        """Find the blocks and experts; raise for a model without experts of the registry."""
        decoder = model.get_decoder()
        prefix = next(name for name, module in model.named_modules() if module is decoder)
        names = [
            f"{prefix}.{name}" if prefix else name
            for name, module in decoder.named_modules()
            if hasattr(module, MARK)
        ]
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
        return cls(decoder, blocks, experts, dict(zip(layers, block_of, strict=True)))

    def only(self, layers: Collection[int]) -> Anatomy:
        """The same model with the experts of these layers only."""
        return Anatomy(
            self.decoder,
            self.blocks,
            {layer: self.experts[layer] for layer in layers},
            {layer: self.block_of_layer[layer] for layer in layers},
        )


def num_experts(module: nn.Module) -> int:
    """Number of experts in a module of the registry: the length of each of its weights."""
    return len(next(module.parameters()))


def _outermost_list(model: nn.Module, name: str) -> str | None:
    parts = name.split(".")
    paths = [".".join(parts[:end]) for end in range(1, len(parts))]
    return next((p for p in paths if isinstance(model.get_submodule(p), nn.ModuleList)), None)
