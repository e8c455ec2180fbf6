"""All exceptions of the package.

    UltraEPError
    |-- ConfigError         an invalid setting, topology or argument          (also a ValueError)
    |-- LoadError           loads or ids of the wrong shape, dtype or range   (also a ValueError)
    |-- FileError           a file that cannot be read or written             (also a ValueError)
    |-- PlanError           a plan that breaks a rule; `.rule` names it
    |-- PlanMismatch        ranks that disagree about settings, step or plan
    |-- SlotError           spare slots that are in use, or too few
    |-- CommunicationError  a rank that failed, died or timed out
    `-- BackendUnavailable  a library that is missing or not supported        (also an ImportError)

Catch `UltraEPError` to catch all of them. `NothingToBalance` is a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UltraEPError(Exception):
    """Base class of the exceptions of this package.

    ranks: that caused the error, as far as this rank knows.
    place: in the program where this rank noticed the error; empty: unknown.
    """

    def __init__(self, *args: object, ranks: Iterable[int] = (), place: object = "") -> None:
        super().__init__(*args)
        self.ranks, self.place = tuple(ranks), str(place)


class ConfigError(UltraEPError, ValueError):
    """A setting, topology or argument is invalid."""


class LoadError(UltraEPError, ValueError):
    """Loads or ids have the wrong shape, dtype or range, or are too large to count exactly."""


class FileError(UltraEPError, ValueError):
    """A file has the wrong contents, or cannot be read or written."""


class PlanError(UltraEPError):
    """A plan breaks a rule. `rule` is its stable short name, see `ultraep.policies`."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


class PlanMismatch(UltraEPError):
    """Ranks of one group disagree about settings, step or plan. The message names the ranks."""


class SlotError(UltraEPError):
    """Spare slots are still in use by a microbatch, or a plan needs more slots than exist."""


class CommunicationError(UltraEPError):
    """A rank failed, died or timed out. The message names the rank if it is known."""

    def at(self, place: object) -> None:
        """Put the place of the program first in the message, unless it names a place already."""
        if not str(self).startswith("at "):
            self.args = (f"at {place}: {self}",)
            self.place = self.place or str(place)


@contextmanager
def errors_at(place: object) -> Iterator[None]:
    """Put a place of the program first in errors of communication of this block."""
    try:
        yield
    except CommunicationError as error:
        error.at(place)
        raise


class BackendUnavailable(UltraEPError, ImportError):
    """A backend or library is not installed, or its version is not supported."""


class NothingToBalance(UserWarning):
    """A balancer has one rank or no spare slots, so it never replicates an expert."""
