"""Models of Hugging Face transformers, balanced.

balance, unbalance            a loaded model: home experts on every rank, and back
balanced_from_pretrained      a checkpoint: every rank reads its home experts
balancers, balanced_experts   who balances a model, and which of its modules
BalancedTrainer               the library's Trainer; BalancedTraining for classes derived of it
"""

from typing import TYPE_CHECKING, Any

from ultraep.integrations.transformers.library import LIBRARY

LIBRARY.check()  # before what needs it

from ultraep.integrations.transformers.balance import (  # noqa: E402
    balance,
    balanced_experts,
    balancers,
    unbalance,
)
from ultraep.integrations.transformers.load import balanced_from_pretrained  # noqa: E402
from ultraep.integrations.transformers.native import enable  # noqa: E402

if TYPE_CHECKING:
    from ultraep.integrations.transformers.training import BalancedTrainer, BalancedTraining

__all__ = [
    "BalancedTrainer",
    "BalancedTraining",
    "balance",
    "balanced_experts",
    "balanced_from_pretrained",
    "balancers",
    "enable",
    "unbalance",
]


def __getattr__(name: str) -> Any:
    if name not in ("BalancedTrainer", "BalancedTraining"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ultraep.integrations.transformers import training  # needs accelerate, and takes seconds

    return getattr(training, name)
