"""Load a balanced model: every rank reads the dense weights and its home experts, nothing else.

The library makes the model without memory, then reads a checkpoint into it. In between, the model
is balanced, and the checkpoint gets a view in which there are home experts only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ultraep.errors import ConfigError, FileError
from ultraep.integrations.transformers.balance import balance, balanced_experts, balancers
from ultraep.runtime.connect import GroupOrName


def balanced_from_pretrained(
    path: str | Path,
    group: GroupOrName = None,
    *,
    slots: int = 1,
    policy: str = "ultraep",
    balancing: Mapping[str, Any] | None = None,
    model_class: type[Any] | None = None,
    **options: Any,
) -> Any:
    """A model from a checkpoint in safetensors, balanced; all ranks of the group call it.

    group, slots, policy: see `balance`; `balancing` has its further options.
    model_class: None: what the checkpoint says that it is.   options: of `from_pretrained`.
    """
    kind = model_class or class_of(path)
    spread = {"slots": slots, "policy": policy, **(balancing or {})}
    with ExitStack() as undo:

        class Loading(kind):  # type: ignore[misc, valid-type]
            """The class of the model, while it is loaded."""

            @staticmethod
            def _load_pretrained_model(
                model: Any, state: Any, files: list[str], loading: Any, *others: Any
            ) -> Any:
                balance(model, group, loaded=False, **spread)
                undo.callback(_close, model)
                with ExitStack() as opened:
                    state = home_state(model, files, loading.weight_mapping or [], opened)
                    return kind._load_pretrained_model(model, state, None, loading, *others)

        Loading.__name__, Loading.__module__ = kind.__name__, kind.__module__
        model = Loading.from_pretrained(path, **options)
        model.__class__ = kind
        if not balanced_experts(model):
            raise FileError(f"{path} holds no safetensors of a whole model: load it, then balance")
        undo.pop_all()
    return model


def class_of(path: str | Path) -> type[Any]:
    """The class of the model that a checkpoint holds."""
    names = transformers.AutoConfig.from_pretrained(path).architectures or []
    found: Any = getattr(transformers, names[0], None) if names else None
    if found is None:
        raise ConfigError(f"{path} is of {names or 'no'} architectures: pass model_class=")
    return found  # type: ignore[no-any-return]


def home_state(
    model: Any, files: Iterable[str], mapping: list[Any], opened: ExitStack
) -> dict[str, Any]:
    """The tensors of a checkpoint, not read yet; those of experts for home experts only."""
    stored: dict[str, Any] = {}
    for file in files:
        if not file.endswith(".safetensors"):
            raise FileError(f"{Path(file).name}: home experts are read from safetensors only")
        reader = opened.enter_context(safe_open(file, framework="pt"))
        stored |= {key: reader.get_slice(key) for key in reader.keys()}  # noqa: SIM118
    sources = _sources(model, stored, mapping)
    for (name, _), keys in sources.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        experts = owner.balancer.topology.experts
        if len(keys) == experts:  # one tensor for each
            for index in set(range(experts)) - set(owner.home_experts):
                del stored[keys[index]]
        elif len(keys) == 1 and stored[keys[0]].get_shape()[0] == experts:
            stored[keys[0]] = HomeRows(stored[keys[0]], owner.home_experts)
        else:
            raise FileError(
                f"{name!r} of {experts} experts is made of {len(keys)} tensors such as "
                f"{keys[0]!r}: load the whole model, then balance it"
            )
    return stored


def _sources(model: Any, stored: Iterable[str], mapping: list[Any]) -> dict[Any, list[str]]:
    """The keys of a checkpoint for every tensor of experts, in the order of experts."""
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    wanted = model.state_dict()
    experts = {f"{name}.{key}" for name, m in balanced_experts(model).items() for key in m.bundle}
    found: dict[Any, list[str]] = defaultdict(list)
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, wanted
        )
        if name in experts:
            found[name, pattern].append(key)
    return found


class HomeRows:
    """Some rows of a tensor in a file; they are read when somebody asks for all there is."""

    def __init__(self, stored: Any, homes: tuple[int, ...]) -> None:
        self._stored, self._homes = stored, homes

    def __getitem__(self, everything: Any) -> torch.Tensor:
        begin, end = (self._homes[0], self._homes[-1] + 1) if self._homes else (0, 1)
        rows: torch.Tensor = self._stored[begin:end]
        return rows[[home - begin for home in self._homes]]

    def get_shape(self) -> list[int]:
        """As it will be."""
        return [len(self._homes), *self._stored.get_shape()[1:]]

    def get_dtype(self) -> str:
        """As it is in the file."""
        kind: str = self._stored.get_dtype()
        return kind


def _close(model: nn.Module) -> None:
    for balancer in balancers(model):
        balancer.close()
