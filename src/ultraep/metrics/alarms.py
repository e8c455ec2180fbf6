"""Two alarms, each with one meaning. They say that balancing is on and does not do its work.

`imbalance_high`     the imbalance after copies stays high
`balancing_skipped`  there is an imbalance to remove, and no copy is made, all the time
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ultraep.metrics.names as names
from ultraep.errors import ConfigError

IMBALANCE_HIGH, BALANCING_SKIPPED = "imbalance_high", "balancing_skipped"
MEANING = {
    IMBALANCE_HIGH: (
        "the fullest rank still has {after:.2f} times the mean load although balancing is on: "
        "too few slots, copies that must serve too many tokens, a domain that is too small, "
        "or a placement by the past that does not fit any more"
    ),
    BALANCING_SKIPPED: (
        "no copy was made in {microbatches:.0f} layers of microbatches, with {before:.2f} times "
        "the mean load on the fullest rank: batches are too small to pay for a copy, the "
        "tolerance allows it, or there are no slots"
    ),
}


@dataclass(frozen=True, kw_only=True)
class AlarmSettings:
    """When to raise an alarm.

    high: mean imbalance after copies, from which on it is too much.
    worth: mean imbalance before copies, from which on there is something to gain.
    patience: readings in a row that must all say so; one that does not ends the alarm.
    """

    high: float = 1.2
    worth: float = 1.1
    patience: int = 3

    def __post_init__(self) -> None:
        for name in ("high", "worth"):
            if not getattr(self, name) > 1:
                raise ConfigError(f"{name} must be above 1, got {getattr(self, name)}")
        if self.patience < 1:
            raise ConfigError(f"patience must be at least 1, got {self.patience}")


class Alarms:
    """Looks at one reading after the other.

    balancing: whether it is on, so that its absence is worth an alarm.
    """

    def __init__(self, settings: AlarmSettings, *, balancing: bool) -> None:
        self._settings, self._balancing = settings, balancing
        self._seen = dict.fromkeys(MEANING, 0)  # readings in a row

    def look(self, values: Mapping[str, float]) -> dict[str, str]:
        """The alarms that hold now, and what they mean.

        >>> alarms = Alarms(AlarmSettings(patience=2), balancing=True)
        >>> bad = {"microbatches": 8, "imbalance_before": 2.0, "imbalance_after": 1.5, "skipped": 0}
        >>> [list(alarms.look(bad)) for _ in range(2)]
        [[], ['imbalance_high']]
        """
        settings = self._settings
        said = {
            IMBALANCE_HIGH: values[names.AFTER] >= settings.high,
            BALANCING_SKIPPED: values[names.SKIPPED] >= 1 and values[names.BEFORE] > settings.worth,
        }
        for name, holds in said.items():
            self._seen[name] = self._seen[name] + 1 if holds and self._balancing else 0
        numbers = {
            "before": values[names.BEFORE],
            "after": values[names.AFTER],
            "microbatches": values["microbatches"],
        }
        return {
            name: meaning.format(**numbers)
            for name, meaning in MEANING.items()
            if self._seen[name] >= settings.patience
        }
