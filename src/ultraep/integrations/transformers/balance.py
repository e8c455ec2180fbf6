"""Balance a loaded model: every rank keeps its home experts, and feeds its own batch.

balancer = balance(model)              # all ranks of torch.distributed
...                                    # train, generate, model.save_pretrained
unbalance(model)                       # all experts on every rank again
"""

from __future__ import annotations

from contextlib import ExitStack
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ultraep.errors import ConfigError
from ultraep.integrations.transformers.check import check_experts, experts_of, num_experts
from ultraep.integrations.transformers.experts import BalancedExperts, reunite, spread
from ultraep.integrations.transformers.save import save_pretrained
from ultraep.parallel.home import expert_parameters
from ultraep.parallel.wrapped import leave_out_experts
from ultraep.runtime.balancer import Balancer
from ultraep.runtime.connect import GroupOrName, resolve_group
from ultraep.topology import even_homes

IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"


def balance(
    model: nn.Module,
    group: GroupOrName = None,
    *,
    slots: int = 1,
    policy: str = "ultraep",
    loaded: bool = True,
    **options: Any,
) -> Balancer:
    """Spread the experts of a model over the ranks of a group, and balance every microbatch.

    group, slots, policy, options: see `Balancer`.
    loaded: whether the model has weights; if not, they come later, for home experts only.

    Experts are those that the library's registry knows. Every rank keeps its home experts and
    frees the others. Layers with another number of experts have another balancer: `balancers` has
    them all, and that of most layers is returned. All ranks call this; nothing is changed if it
    raises.
    """
    modules = experts_of(model)
    check_experts(model, modules, loaded)
    made = _make_balancers(modules, group, options | {"slots": slots, "policy": policy})
    for module in modules.values():
        spread(module, made[num_experts(module)])
    leave_out_experts(model)
    replace_methods(model)
    counts = [num_experts(module) for module in modules.values()]
    return made[max(made, key=counts.count)]


def unbalance(model: nn.Module) -> None:
    """Have all experts on every rank again, in the classes that they had; collective."""
    modules = balanced_experts(model)
    if not modules:
        raise ConfigError(f"{type(model).__name__} is not balanced")
    forget_ignored(model)
    owners = balancers(model)
    for module in modules.values():
        reunite(module)
    restore_methods(model)
    for balancer in owners:
        balancer.close()


def balancers(model: nn.Module) -> list[Balancer]:
    """The balancers of a model: one for each number of experts that its layers have."""
    return list({id(m.balancer): m.balancer for m in balanced_experts(model).values()}.values())


def balanced_experts(model: nn.Module) -> dict[str, BalancedExperts]:
    """The balanced modules of a model, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, BalancedExperts)}


def _make_balancers(
    modules: dict[str, nn.Module], group: GroupOrName, options: dict[str, Any]
) -> dict[int, Balancer]:
    """One for each number of experts; none is left open if one cannot be made."""
    members = resolve_group(group)
    ranks = 1 if members is None else members.size()
    made: dict[int, Balancer] = {}
    with ExitStack() as undo:
        for experts in sorted({num_experts(module) for module in modules.values()}):
            homes = None if experts % ranks == 0 else even_homes(experts, ranks)
            made[experts] = Balancer(group, experts=experts, **{"homes": homes, **options})
            undo.callback(made[experts].close)
        undo.pop_all()
    return made


def forget_ignored(model: nn.Module) -> None:
    """Undo `leave_out_experts`."""
    experts = expert_parameters(model)
    for parameter in experts.values():
        parameter.__dict__.pop("_ddp_ignored", None)
    others = [name for name in getattr(model, IGNORED_BY_DDP, ()) if name not in experts]
    setattr(model, IGNORED_BY_DDP, others)


def generate(model: Any, *inputs: Any, synced_gpus: bool | None = None, **options: Any) -> Any:
    """`generate` of the library on all ranks, each of which goes on until all are done.

    With a static cache the library would compile: there are messages of ranks in between, so it is
    asked not to.
    """
    experts = next(m for m in model.modules() if isinstance(m, BalancedExperts))
    synced = experts.balancer.topology.ranks > 1 if synced_gpus is None else synced_gpus
    options = {"disable_compile": True, **options}
    return type(model).generate(model, *inputs, synced_gpus=synced, **options)


REPLACED = {"generate": generate, "save_pretrained": save_pretrained}


def replace_methods(model: nn.Module) -> None:
    """Replace methods of the library that need all ranks, in the model and in its parts."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and balanced_experts(part):
            for name, method in REPLACED.items():
                if hasattr(part, name):
                    setattr(part, name, MethodType(method, part))


def restore_methods(model: nn.Module) -> None:
    """Undo `replace_methods`."""
    for part in model.modules():
        for name in REPLACED:
            part.__dict__.pop(name, None)
