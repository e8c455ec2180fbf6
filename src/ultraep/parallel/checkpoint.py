"""Model and optimizer for torch.distributed.checkpoint: every expert is a tensor of its own there.

A parameter `moe.experts.down_proj` holds other experts on every rank; saved under that name, only
those of one rank would be left. So its experts are saved as `moe.experts.down_proj.0`, `.1` and so
on, each by a rank that has it, and the checkpoint fits any number of ranks and any homes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ultraep.errors import ConfigError
from ultraep.parallel.home import home_modules
from ultraep.parallel.tensors import local, mesh_of

MODEL, OPTIMIZER = "model.", "optimizer."


class ShardedState:
    """What to give to `dcp.save` and `dcp.load`:

        dcp.save({"training": ShardedState(model, optimizer)}, checkpoint_id=folder)
        dcp.load({"training": ShardedState(model, optimizer)}, checkpoint_id=folder)

    model: as it is, compiled, or wrapped by DistributedDataParallel or `fully_shard`.
    optimizer: None to save or load the model alone.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        model = getattr(model, "_orig_mod", model)
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.optimizers = [] if optimizer is None else [optimizer]

    def state_dict(self) -> dict[str, Any]:
        """All tensors share memory with model and optimizer: `dcp.load` fills these."""
        experts = self._experts()
        state: dict[str, Any] = {}
        for key, value in self._stacked().items():
            state |= by_expert(key, value, experts)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was loaded."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        experts, stacked = self._experts(), self._stacked()
        for key, value in stacked.items():
            parts = by_expert(key, value, experts)
            if key in parts:
                stacked[key] = state[key]
            else:
                for name, part in parts.items():
                    part.copy_(state[name])
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=section(stacked, MODEL),
            optim_state_dict=section(stacked, OPTIMIZER),
            options=flat(),
        )

    def _stacked(self) -> dict[str, Any]:
        """The state with all home experts of this rank in one tensor, as model and optimizer do."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizers, options=flat())
        named: dict[str, Any] = {MODEL + name: value for name, value in model.items()}
        return named | {OPTIMIZER + name: value for name, value in optimizer.items()}

    def _experts(self) -> dict[str, tuple[int, ...]]:
        """The experts in what is kept under these keys, and under keys that start with one."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        found = {}
        for prefix, module in home_modules(self.model).items():
            module.check_stacked()
            own = list(module.state_dict(prefix=prefix and f"{prefix}."))
            own += [names[id(p)] for p in module.home_parameters() if id(p) in names]
            for name in own:
                for start in (MODEL, OPTIMIZER + "state."):
                    found[start + name.replace("_orig_mod.", "")] = module.home_experts
        return found


def by_expert(key: str, value: Any, experts: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What is stacked over experts, each under a key of its own; anything else as it is."""
    owner = key
    while owner and owner not in experts:
        owner = owner.rpartition(".")[0]
    if not owner or not isinstance(value, torch.Tensor) or not value.ndim:
        return {key: value}
    homes = homes_in(key, value, experts[owner])
    rows = local(value)
    return {f"{key}.{expert}": rows[index] for index, expert in enumerate(homes)}


def homes_in(key: str, stacked: torch.Tensor, homes: Sequence[int]) -> Sequence[int]:
    """Those home experts of which this rank has the rows, where several ranks share them."""
    if len(stacked) != len(homes):
        raise ConfigError(f"{key!r} has {len(stacked)} rows for {len(homes)} home experts")
    mesh = mesh_of(stacked)
    if mesh is None:
        return homes
    placements = stacked.placements  # type: ignore[attr-defined]
    if mesh.ndim != 1 or not placements[0].is_shard(0):
        raise ConfigError(f"{key!r} is to be sharded along its experts, got {placements}")
    share = -(-len(homes) // mesh.size())
    first = share * mesh.get_local_rank()
    return homes[first : first + share]


def section(state: Mapping[str, Any], start: str) -> dict[str, Any]:
    return {k.removeprefix(start): value for k, value in state.items() if k.startswith(start)}


def flat() -> Any:
    """One level of keys, for parameters that only some ranks have."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions  # takes a second

    return StateDictOptions(flatten_optimizer_state_dict=True)
