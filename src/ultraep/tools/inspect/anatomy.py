"""Anatomy: where in a model its blocks and its experts are.

Experts are those of transformers' registry: all of its modules are called with hidden states, the
ids that the router chose, and gates. A block is a member of the outermost list of modules that
experts stand in: the layers of the decoder.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from ultraep.errors import ConfigError

MARK = "is_concatenated"  # the registry gives it to every module of experts


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The parts of a model that matter here; names are those in the whole model."""

    decoder: nn.Module  # what is called with token ids
    blocks: dict[str, nn.Module]
    experts: dict[int, nn.Module]  # by the number of their layer
    block_of_layer: dict[int, str]

    @classmethod
    def of(cls, model: Any) -> Anatomy:
        """Find them; a model without experts of the registry is refused by name."""
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
                f"{type(model).__name__} has no experts of transformers' registry: it is no "
                "Mixture-of-Experts model, or one that cannot be looked into"
            )
        blocks = {
            f"{part}.{number}": block
            for part in sorted(filter(None, lists))
            for number, block in enumerate(model.get_submodule(part))
        }
        block_of = {name: next(b for b in blocks if name.startswith(f"{b}.")) for name in names}
        numbers = _numbers(list(block_of.values()), list(blocks))
        experts = dict(zip(numbers, map(model.get_submodule, names), strict=True))
        return cls(decoder, blocks, experts, dict(zip(numbers, block_of.values(), strict=True)))

    def only(self, layers: Collection[int]) -> Anatomy:
        """A view of it in which only these layers are looked at."""
        return Anatomy(
            self.decoder,
            self.blocks,
            {number: self.experts[number] for number in layers},
            {number: self.block_of_layer[number] for number in layers},
        )


def num_experts(module: nn.Module) -> int:
    """Experts of a module of the registry: all of its weights have one row for each."""
    return len(next(module.parameters()))


def _outermost_list(model: nn.Module, name: str) -> str | None:
    parts = name.split(".")
    for end in range(1, len(parts)):
        path = ".".join(parts[:end])
        if isinstance(model.get_submodule(path), nn.ModuleList):
            return path
    return None


def _numbers(block_of: list[str], blocks: list[str]) -> list[int]:
    """Blocks count as layers, dense ones too; where a block has several experts, these do."""
    if len(set(block_of)) < len(block_of):
        return list(range(len(block_of)))
    return [blocks.index(block) for block in block_of]
