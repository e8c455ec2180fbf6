"""Load a balanced model: every rank reads only the dense weights and its home experts.

The library builds the model on the meta device and then reads the checkpoint. In between, this
module balances the model and restricts the checkpoint to the home experts.
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
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ultraep.errors import ConfigError, FileError
from ultraep.integrations.transformers.balance import balance, balancers, check_formats
from ultraep.integrations.transformers.experts import balanced_experts, expert_owners
from ultraep.runtime.connect import GroupOrName


def balanced_from_pretrained(
    path: str | Path,
    group: GroupOrName = None,
    *,
    slots: int = 1,
    policy: str | None = None,
    balancing: Mapping[str, Any] | None = None,
    model_class: type[Any] | None = None,
    **options: Any,
) -> Any:
    """Load a model from safetensors and balance it. Collective.

    group, slots, policy, balancing: see `balance`; `balancing` holds its other options.
    model_class: None: the class named in the checkpoint.   options: passed to `from_pretrained`.
    """
    original = model_class or class_of(path)
    balance_options = {"slots": slots, "policy": policy, **(balancing or {})}
    with ExitStack() as undo:

        class Loading(original):  # type: ignore[misc, valid-type]
            """The class of the model while it is loaded."""

            @staticmethod
            def _load_pretrained_model(
                model: Any, state: Any, files: list[str], loading: Any, *others: Any
            ) -> Any:
                balance(model, group, loaded=False, **balance_options)
                for balancer in balancers(model):
                    undo.callback(balancer.close)
                with ExitStack() as opened:
                    state = home_state(model, files, loading.weight_mapping or [], opened)
                    return original._load_pretrained_model(model, state, None, loading, *others)

        Loading.__name__, Loading.__module__ = original.__name__, original.__module__
        model = Loading.from_pretrained(path, **options)
        model.__class__ = original
        if not balanced_experts(model):
            raise FileError(
                f"{path} has no safetensors of a whole model: load it, then call balance"
            )
        check_formats(model, balanced_experts(model))  # some quantisers replace loaded weights
        undo.pop_all()
    return model


def class_of(path: str | Path) -> type[Any]:
    """Return the model class named in a checkpoint."""
    names = transformers.AutoConfig.from_pretrained(path).architectures or []
    model_class: Any = getattr(transformers, names[0], None) if names else None
    if model_class is None:
        raise ConfigError(f"{path} names the architectures {names}: pass model_class=")
    return model_class  # type: ignore[no-any-return]


def home_state(
    model: Any, files: Iterable[str], mapping: list[Any], opened: ExitStack
) -> dict[str, Any]:
    """Return the tensors of a checkpoint, unread, with the home experts only."""
    stored: dict[str, Any] = {}
    for file in files:
        if not file.endswith(".safetensors"):
            raise FileError(f"{Path(file).name}: home experts can be read from safetensors only")
        reader = opened.enter_context(safe_open(file, framework="pt"))
        stored |= {key: reader.get_slice(key) for key in reader.keys()}  # noqa: SIM118
    owners = expert_owners(model)
    for (name, _), keys in _sources(model, stored, mapping).items():
        owner = owners.get(name)
        if owner is None:
            continue
        experts = owner.balancer.topology.experts
        if len(keys) == experts:  # one tensor per expert
            for index in set(range(experts)) - set(owner.home_experts):
                del stored[keys[index]]
        elif len(keys) == 1 and stored[keys[0]].get_shape()[0] == experts:
            stored[keys[0]] = HomeRows(stored[keys[0]], owner.home_experts)
        else:
            raise FileError(
                f"{name!r} of {experts} experts is stored as {len(keys)} tensors such as "
                f"{keys[0]!r}: load the whole model, then call balance"
            )
    return stored


def _sources(model: Any, stored: Iterable[str], mapping: list[Any]) -> dict[Any, list[str]]:
    """Return the checkpoint keys of every tensor of the model, in the order of experts."""
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state, sources = model.state_dict(), defaultdict(list)
    for key in sorted(stored, key=dot_natural_key):
        target = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        sources[target].append(key)  # name in the model, and pattern of a converter
    return sources


class HomeRows:
    """The rows of the home experts in a stored tensor, read on indexing."""

    def __init__(self, stored: Any, homes: tuple[int, ...]) -> None:
        self._stored, self._homes = stored, homes

    def __getitem__(self, everything: Any) -> torch.Tensor:
        begin, end = (self._homes[0], self._homes[-1] + 1) if self._homes else (0, 1)
        rows: torch.Tensor = self._stored[begin:end]
        return rows[[home - begin for home in self._homes]]

    def get_shape(self) -> list[int]:
        """Return the shape after reading."""
        return [len(self._homes), *self._stored.get_shape()[1:]]

    def get_dtype(self) -> str:
        return str(self._stored.get_dtype())
