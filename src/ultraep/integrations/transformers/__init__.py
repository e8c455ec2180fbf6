"""Balanced models of Hugging Face transformers.

balance, unbalance            spread the experts of a loaded model over ranks, and undo it
balanced_from_pretrained      load a checkpoint; every rank reads only its home experts
balancers, balanced_experts   the balancers and the balanced modules of a model
BalancedTrainer               the Trainer for balanced models; BalancedTraining for subclasses
ImbalanceCallback             adds imbalance and replicas to the logs of a trainer
enable                        balance the library's own expert parallelism
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ultraep.supported import TRANSFORMERS

TRANSFORMERS.check()  # before importing it

from ultraep.integrations.transformers.balance import (  # noqa: E402
    balance,
    balancers,
    unbalance,
)
from ultraep.integrations.transformers.experts import balanced_experts  # noqa: E402
from ultraep.integrations.transformers.load import balanced_from_pretrained  # noqa: E402

if TYPE_CHECKING:
    from ultraep.integrations.transformers.native import enable
    from ultraep.integrations.transformers.training import (
        BalancedTrainer,
        BalancedTraining,
        ImbalanceCallback,
    )

__all__ = [
    "BalancedTrainer",
    "BalancedTraining",
    "ImbalanceCallback",
    "balance",
    "balanced_experts",
    "balanced_from_pretrained",
    "balancers",
    "enable",
    "unbalance",
]


# Imported on first use: `training` needs accelerate and takes seconds, `native` a newer library.
_LAZY = {
    "BalancedTrainer": "training",
    "BalancedTraining": "training",
    "ImbalanceCallback": "training",
    "enable": "native",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
