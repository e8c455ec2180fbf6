"""Model and optimizer for torch.distributed.checkpoint, with one entry per expert.

A parameter such as `moe.experts.down_proj` holds different experts on every rank. Saved under that
name, only the experts of one rank would survive. `ShardedState` saves `moe.experts.down_proj.0`,
`.1` and so on, each from a rank that holds it, so the checkpoint loads on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ultraep.errors import ConfigError
from ultraep.parallel.home import home_modules, local, mesh_of

MODEL, OPTIMIZER = "model.", "optimizer."


class ShardedState:
    """A state for `dcp.save` and `dcp.load`:

        dcp.save({"training": ShardedState(model, optimizer)}, checkpoint_id=folder)
        dcp.load({"training": ShardedState(model, optimizer)}, checkpoint_id=folder)

    model: plain, compiled, or wrapped by DistributedDataParallel or `fully_shard`.
    optimizer: None: save or load the model only.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        model = getattr(model, "_orig_mod", model)
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.optimizers = [] if optimizer is None else [optimizer]

    def state_dict(self) -> dict[str, Any]:
        """Return the state; its tensors share memory with model and optimizer."""
        experts = self._experts()
        state: dict[str, Any] = {}
        for key, value in self._stacked().items():
            state |= _by_expert(key, value, experts)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy a loaded state into model and optimizer."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        experts, stacked = self._experts(), self._stacked()
        for key, value in stacked.items():
            parts = _by_expert(key, value, experts)
            if key in parts:
                stacked[key] = state[key]
            else:
                for name, part in parts.items():
                    part.copy_(state[name])
        model, optimizer = (
            {key.removeprefix(start): v for key, v in stacked.items() if key.startswith(start)}
            for start in (MODEL, OPTIMIZER)
        )
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=model,
            optim_state_dict=optimizer,
            options=_options(),
        )

    def _stacked(self) -> dict[str, Any]:
        """Return the state of model and optimizer, with experts stacked as in the model."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizers, options=_options())
        state: dict[str, Any] = {MODEL + name: value for name, value in model.items()}
        return state | {OPTIMIZER + name: value for name, value in optimizer.items()}

    def _experts(self) -> dict[str, tuple[int, ...]]:
        """Return the home experts of each state key, or prefix of keys, of expert tensors."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        experts = {}
        for prefix, module in home_modules(self.model).items():
            module.check_stacked()
            own = list(module.state_dict(prefix=prefix and f"{prefix}."))
            own += [names[id(p)] for p in module.home_parameters() if id(p) in names]
            for name in own:
                for start in (MODEL, OPTIMIZER + "state."):
                    experts[start + name.replace("_orig_mod.", "")] = module.home_experts
        return experts


def _by_expert(key: str, value: Any, experts: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Split a tensor that is stacked over experts into one entry per expert."""
    owner = key
    while owner and owner not in experts:
        owner = owner.rpartition(".")[0]
    if not owner or not isinstance(value, torch.Tensor) or not value.ndim:
        return {key: value}
    homes = _local_homes(key, value, experts[owner])
    rows = local(value)
    return {f"{key}.{expert}": rows[index] for index, expert in enumerate(homes)}


def _local_homes(key: str, stacked: torch.Tensor, homes: Sequence[int]) -> Sequence[int]:
    """Return the home experts whose rows this rank holds, if several ranks shard them."""
    if len(stacked) != len(homes):
        raise ConfigError(f"{key!r} has {len(stacked)} rows for {len(homes)} home experts")
    mesh = mesh_of(stacked)
    if mesh is None:
        return homes
    placements = stacked.placements  # type: ignore[attr-defined]
    if mesh.ndim != 1 or not placements[0].is_shard(0):
        raise ConfigError(f"{key!r} must be sharded along its experts, got {placements}")
    share = -(-len(homes) // mesh.size())
    first = share * mesh.get_local_rank()
    return homes[first : first + share]


def _options() -> Any:
    """Return options for one level of keys, as some parameters exist on some ranks only."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions  # takes a second

    return StateDictOptions(flatten_optimizer_state_dict=True)
