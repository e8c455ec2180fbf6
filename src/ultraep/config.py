"""BalanceConfig and Rates: the settings of the planner, frozen and checked when made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ultraep.errors import ConfigError

PARTS = 1_000_000  # the tolerance is kept in millionths, so that no float decides a plan
MAX_TOLERANCE = 1_000.0
MOST_DIGITS = 40  # of a number in a text; int() refuses some thousand with an error of its own
UNLIMITED = 1 << 40  # copies, tokens, picoseconds
OBJECTIVES = ("time", "balance")
LADDER = (  # millionths
    *(5_000, 10_000, 20_000, 30_000, 50_000, 70_000, 100_000, 140_000),
    *(200_000, 280_000, 400_000, 800_000, 1_600_000),
)
MOST_PER_ROW = (1 << 31) - 1  # picoseconds: times as many tokens, less than 2**62
MOST_COPIES = 1 << 20  # whose times are added up: times UNLIMITED, at most 2**60
LONGEST_TIMEOUT = 1e9  # seconds; clocks and queues overflow not far beyond


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a plan costs, in whole picoseconds, so that no float decides a plan.

    row: a token on the fullest rank.
    copy: a copy that the busiest rank receives, or an expert that it gives away.
    each: a copy, wherever it is.
    layer: that there are copies at all.

    A time is less than 2**63, for up to `MOST_COPIES` spare slots.
    """

    row: int
    copy: int = 0
    each: int = 0
    layer: int = 0

    def __post_init__(self) -> None:
        _check_integer("row", self.row, least=1, most=MOST_PER_ROW)
        for name in ("copy", "each", "layer"):
            _check_integer(name, getattr(self, name), least=0)

    @classmethod
    def from_seconds(cls, *, row: float, copy: float, each: float, layer: float) -> Rates:
        """Rates with two digits; all of them in parts where one is longer than can be counted."""
        numbers = [max(0, round(seconds * PER_SECOND)) for seconds in (row, copy, each, layer)]
        while numbers[0] > MOST_PER_ROW or max(numbers) > UNLIMITED:  # what pays is the same
            numbers = [number // 10 for number in numbers]
        first, *others = map(two_digits, numbers)
        row_ps = min(max(1, first), MOST_PER_ROW)
        return cls.from_numbers([row_ps, *(min(number, UNLIMITED) for number in others)])

    @classmethod
    def from_text(cls, text: str) -> Rates:
        """Rates as `str` tells them; what is not named is 0.

        >>> Rates.from_text("row=5300,copy=41000000")
        Rates(row=5300, copy=41000000, each=0, layer=0)
        """
        numbers: dict[str, int] = {}
        for part in text.replace(",", " ").split():
            name, _, number = part.partition("=")
            digits = number.isascii() and number.isdecimal() and len(number) <= MOST_DIGITS
            if name not in RATE_NAMES or name in numbers or not digits:
                raise ConfigError(
                    f"rates are {','.join(f'{n}=PICOSECONDS' for n in RATE_NAMES)}, got {text!r}"
                )
            numbers[name] = int(number)
        if "row" not in numbers:
            raise ConfigError(f"rates need row=PICOSECONDS, got {text!r}")
        return cls(**numbers)

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Rates:
        """Rates of `numbers`."""
        return cls(**dict(zip(RATE_NAMES, numbers, strict=True)))

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name)}" for name in RATE_NAMES)

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """All four, in the order in which backends take them."""
        return self.row, self.copy, self.each, self.layer

    def time(self, *, peak: int, transfers: int, copies: int) -> int:
        """Picoseconds of a plan. `transfers`: most copies that one rank receives or gives away."""
        fixed = self.layer if copies else 0
        return self.row * peak + self.copy * transfers + self.each * copies + fixed


RATE_NAMES = ("row", "copy", "each", "layer")
NO_RATES = (0, 0, 0, 0)
PER_SECOND = 10**12  # picoseconds


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceConfig:
    """How a microbatch is balanced.

    policy: name of a registered policy; `ultraep.policy_names()` lists them.
    tolerance: how far above the mean the fullest rank may stay. 0.0 asks for the best there is;
        0.01 stops at 1 % above the mean and uses as few copies as possible.
    min_tokens_per_replica: a copy that would serve fewer tokens is not made.
    max_replicas: most copies in one fast-link domain; None leaves that to the slots.
    locality: tokens stay on their own rank where a copy there has room for them.
    objective: "balance" keeps to the tolerance with as few replicas as it finds, whatever they
        cost; "time" also tries larger tolerances, fewer replicas per rank and no replicas, and
        takes the plan that is quickest by the rates.
    rates: what tokens and copies cost; without them, "time" plans as "balance" does.
    """

    policy: str = "ultraep"
    tolerance: float = 0.0
    min_tokens_per_replica: int = 1
    max_replicas: int | None = None
    locality: bool = True
    objective: str = "time"
    rates: Rates | None = None

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
        if self.objective not in OBJECTIVES:
            raise ConfigError(
                f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}"
            )
        if self.rates is not None and not isinstance(self.rates, Rates):
            raise ConfigError(f"rates must be Rates or None, got {self.rates!r}")

    @property
    def replica_limit(self) -> int:
        """Most copies in one domain, as a number; without a limit, more than there can be."""
        return UNLIMITED if self.max_replicas is None else self.max_replicas

    @property
    def tolerance_parts(self) -> int:
        """The tolerance in millionths of the mean."""
        return round(self.tolerance * PARTS)

    def rates_for(self, spare_slots: int) -> tuple[int, int, int, int]:
        """The rates as backends take them; all 0 where time is not what decides."""
        if self.objective == "balance" or self.rates is None:
            return NO_RATES
        if spare_slots > MOST_COPIES:
            raise ConfigError(
                f"times are added up for at most {MOST_COPIES} spare slots, there are {spare_slots}"
            )
        return self.rates.numbers


def two_digits(number: int) -> int:
    """The number with two digits that count.

    >>> two_digits(12_345), two_digits(96), two_digits(0), two_digits(9_960)
    (12000, 96, 0, 10000)
    """
    step: int = 10 ** max(0, len(str(number)) - 2)
    return (number + step // 2) // step * step


def rungs_of(tolerance_parts: int) -> list[int]:
    """The tolerances that objective "time" tries: the least that is wanted, then larger ones."""
    return [tolerance_parts, *(parts for parts in LADDER if parts > tolerance_parts)]


def _check_integer(name: str, value: object, *, least: int, most: int = UNLIMITED) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value > most:
        raise ConfigError(f"{name} must be at most {most}, got {value}")


def check_timeout(seconds: float | None) -> None:
    """Refuse what is no time to wait for a rank; None is for the caller to understand."""
    if seconds is not None and (
        not isinstance(seconds, (int, float)) or not 0 < seconds <= LONGEST_TIMEOUT
    ):
        raise ConfigError(
            f"timeout must be a positive number of seconds, at most {LONGEST_TIMEOUT:g}, "
            f"got {seconds!r}"
        )
