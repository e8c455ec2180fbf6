"""Methods of a balanced model in place of the library's: those that need all ranks."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ultraep.integrations.transformers.experts import BalancedExperts
from ultraep.integrations.transformers.save import save_pretrained


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
    """Let the model, and models that are part of it, do with all ranks what needs them."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and _has_experts(part):
            for name, method in REPLACED.items():
                if hasattr(part, name):
                    setattr(part, name, MethodType(method, part))


def restore_methods(model: nn.Module) -> None:
    """Undo `replace_methods`."""
    for part in model.modules():
        for name in REPLACED:
            part.__dict__.pop(name, None)


def _has_experts(model: nn.Module) -> bool:
    return any(isinstance(module, BalancedExperts) for module in model.modules())
