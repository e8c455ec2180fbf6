"""Offline baselines: planners of other projects, reimplemented to compare with.

They are entry points of the group `ultraep.policies`, so `ultraep.plan` and the tools find them by
name and import the module of a baseline when it is first used. A running balancer refuses them.
"""

from __future__ import annotations

import logging

from ultraep.config import BalanceConfig
from ultraep.policies import BUILT_IN

logger = logging.getLogger(__name__)
BASELINES = ("quota", "echo", "llep", "moonep", "eplb", "lplb", "flashlb", "ideal")
IDEAL = "ideal"  # the only baseline that plans with speeds
OWN = (*BUILT_IN, *BASELINES)  # policies of this project


def warn_if_speeds_ignored(config: BalanceConfig) -> None:
    """Log a warning if the config has speeds and its policy balances rows."""
    if config.speeds is not None and config.policy in BASELINES and config.policy != IDEAL:
        logger.warning(
            "policy %r ignores speeds: it balances rows, not rows / speed", config.policy
        )
