"""BalanceConfig: the settings of the planner, frozen and checked when made."""

from __future__ import annotations

from dataclasses import dataclass

from ultraep.errors import ConfigError

PARTS = 1_000_000  # the tolerance is kept in millionths, so that no float decides a plan
MAX_TOLERANCE = 1_000.0
UNLIMITED = 1 << 40  # copies, tokens
LONGEST_TIMEOUT = 1e9  # seconds; clocks and queues overflow not far beyond


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceConfig:
    """How a microbatch is balanced.

    policy: name of a registered policy; `ultraep.policy_names()` lists them.
    tolerance: how far above the mean the fullest rank may stay. 0.0 asks for the best there is;
        0.01 stops at 1 % above the mean and uses as few copies as possible.
    min_tokens_per_replica: a copy that would serve fewer tokens is not made.
    max_replicas: most copies in one fast-link domain; None leaves that to the slots.
    locality: tokens stay on their own rank where a copy there has room for them.
    """

    policy: str = "ultraep"
    tolerance: float = 0.0
    min_tokens_per_replica: int = 1
    max_replicas: int | None = None
    locality: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str) or not self.policy:
            raise ConfigError(f"policy must be a name, got {self.policy!r}")
        if not isinstance(self.tolerance, (int, float)) or isinstance(self.tolerance, bool):
            raise ConfigError(f"tolerance must be a number, got {self.tolerance!r}")
        if not 0 <= self.tolerance <= MAX_TOLERANCE:
            raise ConfigError(
                f"tolerance must lie between 0 and {MAX_TOLERANCE:g}, got {self.tolerance}"
            )
        _check_integer("min_tokens_per_replica", self.min_tokens_per_replica, least=1)
        if self.max_replicas is not None:
            _check_integer("max_replicas", self.max_replicas, least=0)
        if not isinstance(self.locality, bool):
            raise ConfigError(f"locality must be True or False, got {self.locality!r}")

    @property
    def replica_limit(self) -> int:
        """Most copies in one domain, as a number; without a limit, more than there can be."""
        return UNLIMITED if self.max_replicas is None else self.max_replicas

    @property
    def tolerance_parts(self) -> int:
        """The tolerance in millionths of the mean."""
        return round(self.tolerance * PARTS)


def _check_integer(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value > UNLIMITED:
        raise ConfigError(f"{name} must be at most {UNLIMITED}, got {value}")


def check_timeout(seconds: float | None) -> None:
    """Refuse what is no time to wait for a rank; None is for the caller to understand."""
    if seconds is not None and (
        not isinstance(seconds, (int, float)) or not 0 < seconds <= LONGEST_TIMEOUT
    ):
        raise ConfigError(
            f"timeout must be a positive number of seconds, at most {LONGEST_TIMEOUT:g}, "
            f"got {seconds!r}"
        )
