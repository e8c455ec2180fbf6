"""What the policies we compare with share: the load a rank may have, and the limits they refuse."""

from __future__ import annotations

from ultraep.config import PARTS, BalanceConfig
from ultraep.errors import ConfigError


def allowed_load(tokens: int, ranks: int, tolerance_parts: int = 0) -> int:
    """The mean rank load, plus so many millionths of it, rounded up without floats.

    >>> allowed_load(10, 4), allowed_load(1000, 4, tolerance_parts=100_000)
    (3, 275)
    """
    return -(-tokens * (PARTS + tolerance_parts) // (ranks * PARTS))


def refuse_limits(config: BalanceConfig, *names: str) -> None:
    """Raise `ConfigError` if one of these settings is not at its default.

    For settings that a policy has no means to honour: better refused than ignored.
    """
    default = BalanceConfig()
    for name in names:
        given, usual = getattr(config, name), getattr(default, name)
        if given != usual:
            raise ConfigError(
                f"policy {config.policy!r} cannot honour {name}={given}: leave it at {usual}"
            )
