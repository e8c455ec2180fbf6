"""Models of Hugging Face transformers, balanced.

balance, unbalance            a loaded model: home experts on every rank, and back
"""

from ultraep.integrations.transformers.library import check_library

check_library()  # before what needs it

from ultraep.integrations.transformers.balance import (  # noqa: E402
    balance,
    balanced_experts,
    balancers,
    unbalance,
)

__all__ = ["balance", "balanced_experts", "balancers", "unbalance"]
