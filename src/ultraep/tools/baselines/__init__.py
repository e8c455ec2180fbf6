"""Offline baselines: planners of other projects, planned again here to compare with.

Importing this package registers them, so that `ultraep.plan` and the tools find them by name. Each
module is imported when its policy is first used. A running balancer refuses them.
"""

from __future__ import annotations

import logging

from ultraep.config import BalanceConfig
from ultraep.policies import BASELINES, register_modules

logger = logging.getLogger(__name__)
IDEAL = "ideal"  # the only baseline that plans with speeds

register_modules({name: f"{__name__}.{name}" for name in BASELINES})


def warn_if_speeds_ignored(config: BalanceConfig) -> None:
    """Log a warning if the config has speeds and its policy balances rows."""
    if config.speeds is not None and config.policy in BASELINES and config.policy != IDEAL:
        logger.warning(
            "policy %r ignores speeds: it balances rows, not rows / speed", config.policy
        )
