"""Everything that can go wrong, as one small tree.

    UltraEPError
    |-- ConfigError         a setting, topology or argument that cannot work  (also a ValueError)
    |-- LoadError           loads that are no loads: wrong shape, sign, type  (also a ValueError)
    |-- FileError           a file that cannot be read, or not be written     (also a ValueError)
    |-- PlanError           a plan that breaks one of its rules; `.rule` names it
    |-- PlanMismatch        ranks that disagree about settings, step or plan; names the ranks
    |-- SlotError           spare slots that are in use, missing, or too few
    |-- CommunicationError  a rank that failed, died or did not answer in time
    `-- BackendUnavailable  a library that is missing, or of another version  (also an ImportError)

Catch `UltraEPError` to catch them all. Messages name what was given and what was expected.
`NothingToBalance` is a warning, not an error.
"""

from __future__ import annotations


class UltraEPError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(UltraEPError, ValueError):
    """A setting, topology or argument that cannot work."""


class LoadError(UltraEPError, ValueError):
    """Loads of the wrong shape, type or sign, or too large to count exactly."""


class FileError(UltraEPError, ValueError):
    """A file that does not hold what is wanted, or that cannot be written."""


class PlanError(UltraEPError):
    """A plan that breaks one of its rules. `rule` is a short, stable name of that rule."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


class PlanMismatch(UltraEPError):
    """Ranks of one group that disagree about settings, step or plan. The message names them."""


class SlotError(UltraEPError):
    """Spare slots that a microbatch still uses, or that a plan needs and nobody has."""


class CommunicationError(UltraEPError):
    """A rank that failed, died or did not answer in time. The message names it where known."""


class BackendUnavailable(UltraEPError, ImportError):
    """A backend or library that is not installed, or has a version that is not supported."""


class NothingToBalance(UserWarning):
    """A balancer with one rank, or without spare slots: it never replicates an expert."""
