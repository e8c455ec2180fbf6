"""BalanceConfig and Rates: the settings of the planner, frozen and validated."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ultraep.errors import ConfigError

PARTS = 1_000_000  # the tolerance counts millionths: plans depend on integers only
NOMINAL_SPEED = 1_000  # speeds count thousandths of it
UNITS_PER_ROW = 1_000  # with speeds, thresholds count thousandths of a row at nominal speed
SPEED_RANGE = (10, 10_000)
MAX_SPEED_RATIO = 100
AUTO = "auto"  # speeds that a balancer learns
RATES_VARIABLE = "ULTRAEP_RATES"  # environment variable with rates for all balancers
POLICY_VARIABLE = "ULTRAEP_POLICY"
OFF = "off"
MAX_ROWS = (1 << 31) - 1  # of a microbatch
MAX_THRESHOLD = (MAX_ROWS + 1) * PARTS // SPEED_RANGE[0]  # all rows on the slowest rank
MAX_TOLERANCE = 1_000.0
MOST_DIGITS = 40  # of a number in a text; int() raises its own error beyond some thousand
UNLIMITED = 1 << 40  # replicas, rows, picoseconds
OBJECTIVES = ("time", "balance")
LADDER = (  # tolerances that objective "time" tries, in millionths
    *(5_000, 10_000, 20_000, 30_000, 50_000, 70_000, 100_000, 140_000),
    *(200_000, 280_000, 400_000, 800_000, 1_600_000),
)
MOST_PER_ROW = (1 << 31) - 1  # picoseconds; times 2**31 rows, less than 2**62
MOST_REPLICAS = 1 << 20  # times UNLIMITED picoseconds, at most 2**60
LONGEST_TIMEOUT = 1e9  # seconds; clocks and queues overflow beyond

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The cost of a plan, in integer picoseconds.

    row: for each row on the fullest rank.
    copy: for each replica that the busiest rank receives, or expert that it sends.
    each: for each replica in the group.
    layer: once, if there are any replicas.

    Times stay below 2**63 for up to `MOST_REPLICAS` spare slots.
    """

    row: int
    copy: int = 0
    each: int = 0
    layer: int = 0

    def __post_init__(self) -> None:
        check_integer("row", self.row, least=1, most=MOST_PER_ROW)
        for name in ("copy", "each", "layer"):
            check_integer(name, getattr(self, name), least=0)

    @classmethod
    def from_seconds(cls, *, row: float, copy: float, each: float, layer: float) -> Rates:
        """Round rates in seconds to two digits; scale all down if one exceeds the range."""
        numbers = [max(0, round(seconds * PER_SECOND)) for seconds in (row, copy, each, layer)]
        while numbers[0] > MOST_PER_ROW or max(numbers) > UNLIMITED:  # plans stay the same
            numbers = [number // 10 for number in numbers]
        first, *others = map(two_digits, numbers)
        row_ps = min(max(1, first), MOST_PER_ROW)
        return cls.from_numbers([row_ps, *(min(number, UNLIMITED) for number in others)])

    @classmethod
    def from_text(cls, text: str) -> Rates:
        """Parse the text that `str` returns; rates that are missing are 0.

        >>> Rates.from_text("row=5300,copy=41000000")
        Rates(row=5300, copy=41000000, each=0, layer=0)
        """
        numbers: dict[str, int] = {}
        for part in text.replace(",", " ").split():
            name, _, number = part.partition("=")
            digits = number.isascii() and number.isdecimal() and len(number) <= MOST_DIGITS
            if name not in RATE_NAMES or name in numbers or not digits:
                raise ConfigError(
                    f"rates must be {','.join(f'{n}=PICOSECONDS' for n in RATE_NAMES)}, "
                    f"got {text!r}"
                )
            numbers[name] = int(number)
        if "row" not in numbers:
            raise ConfigError(f"rates need row=PICOSECONDS, got {text!r}")
        return cls(**numbers)

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Rates:
        return cls(**dict(zip(RATE_NAMES, numbers, strict=True)))

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name)}" for name in RATE_NAMES)

    @property
    def microseconds(self) -> dict[str, float]:
        """The rates by name, for people."""
        return {name: getattr(self, name) / PER_MICROSECOND for name in RATE_NAMES}

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """Row, copy, each, layer: the order in which backends expect them."""
        return self.row, self.copy, self.each, self.layer

    @property
    def rows_to_pay(self) -> int:
        """The rows that the busiest rank must save for one replica to pay.

        >>> Rates(row=5_300, copy=41_000_000, layer=1_400_000).rows_to_pay
        8000
        """
        return -(-self.time(peak=0, transfers=1, replicas=1) // self.row)

    def time(self, *, peak: int, transfers: int, replicas: int, unit: int = 1) -> int:
        """Return the picoseconds of a plan.

        peak: rows of the fullest rank, in units of which a row has `unit`.
        transfers: most replicas that one rank receives or sends.
        """
        fixed = self.layer if replicas else 0
        return self.row * peak // unit + self.copy * transfers + self.each * replicas + fixed


RATE_NAMES = ("row", "copy", "each", "layer")
NO_RATES = (0, 0, 0, 0)
PER_SECOND, PER_MICROSECOND = 10**12, 10**6  # picoseconds


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceConfig:
    """Settings of the planner.

    policy: name of a registered policy, see `ultraep.policy_names()`.
    tolerance: allowed excess of the fullest rank over the mean. 0.0: the best balance; 0.01: stop
        at 1 % above the mean and use as few replicas as possible.
    min_tokens_per_replica: fewest rows that a replica may serve.
    max_replicas: most replicas in one fast-link domain; None: limited by the slots only.
    locality: prefer to serve rows on the rank they come from.
    objective: "balance" meets the tolerance with few replicas, whatever they cost. "time" also
        tries larger tolerances, fewer replicas per rank and no replicas, and chooses the plan that
        is fastest according to the rates.
    rates: the cost of rows and replicas. Without rates, "time" plans like "balance".
    speeds: of every rank, in thousandths of the nominal speed. Plans then balance rows over
        speed, and `Rates.row` is the time of a row at nominal speed. None or equal: rows. "auto": a
        `Balancer` measures them and adapts its plans (docs/plan.md).
    """

    policy: str = "ultraep"
    tolerance: float = 0.0
    min_tokens_per_replica: int = 1
    max_replicas: int | None = None
    locality: bool = True
    objective: str = "time"
    rates: Rates | None = None
    speeds: tuple[int, ...] | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str) or not self.policy:
            raise ConfigError(f"policy must be a name, got {self.policy!r}")
        if not isinstance(self.tolerance, (int, float)) or isinstance(self.tolerance, bool):
            raise ConfigError(f"tolerance must be a number, got {self.tolerance!r}")
        if not 0 <= self.tolerance <= MAX_TOLERANCE:
            raise ConfigError(
                f"tolerance must lie between 0 and {MAX_TOLERANCE:g}, got {self.tolerance}"
            )
        check_integer("min_tokens_per_replica", self.min_tokens_per_replica, least=1)
        if self.max_replicas is not None:
            check_integer("max_replicas", self.max_replicas, least=0)
        if not isinstance(self.locality, bool):
            raise ConfigError(f"locality must be True or False, got {self.locality!r}")
        check_choice("objective", self.objective, OBJECTIVES)
        if self.rates is not None and not isinstance(self.rates, Rates):
            raise ConfigError(f"rates must be Rates or None, got {self.rates!r}")
        if self.speeds not in (None, AUTO):
            object.__setattr__(self, "speeds", checked_speeds(self.speeds))

    @property
    def replica_limit(self) -> int:
        """`max_replicas` as an integer; `UNLIMITED` for None."""
        return UNLIMITED if self.max_replicas is None else self.max_replicas

    @property
    def tolerance_parts(self) -> int:
        """The tolerance in millionths of the mean."""
        return round(self.tolerance * PARTS)

    def rates_for(self, spare_slots: int) -> tuple[int, int, int, int]:
        """Return the rates for backends; zeros if the objective is balance or rates are unknown."""
        if self.objective == "balance" or self.rates is None:
            return NO_RATES
        if spare_slots > MOST_REPLICAS:
            raise ConfigError(
                f"rates support at most {MOST_REPLICAS} spare slots, got {spare_slots}; use "
                'objective="balance"'
            )
        row, copy, each, layer = self.rates.numbers
        slowest = min(_unless_equal(self._numbers()), default=NOMINAL_SPEED)
        while row * NOMINAL_SPEED > MOST_PER_ROW * slowest:  # plans stay the same
            row, copy, each, layer = row // 10, copy // 10, each // 10, layer // 10
        return row, copy, each, layer

    def speeds_for(self, ranks: int) -> tuple[int, ...]:
        """Return the speeds for backends, one for each rank; none if all of them are equal."""
        if self.speeds is None:
            return ()
        speeds = self._numbers()
        if speeds and len(speeds) != ranks:
            raise ConfigError(
                f"speeds must have one value for each of the {ranks} ranks, got {len(speeds)}"
            )
        return _unless_equal(speeds)

    def _numbers(self) -> tuple[int, ...]:
        """Return the speeds; none if they are None."""
        if isinstance(self.speeds, str):
            raise ConfigError(
                f"speeds={self.speeds!r} works in a Balancer only, which measures the ranks; pass "
                "one integer for each rank"
            )
        return self.speeds or ()


def checked_speeds(speeds: object) -> tuple[int, ...]:
    """Return the speeds as a tuple; raise if one of them, or their ratio, is out of range."""
    if isinstance(speeds, str) or not isinstance(speeds, Iterable):
        raise ConfigError(
            f"speeds must be integers, one for each rank, or {AUTO!r}, or None, got {speeds!r}"
        )
    values = tuple(speeds)
    least, most = SPEED_RANGE
    for rank, speed in enumerate(values):
        if not isinstance(speed, int) or isinstance(speed, bool) or not least <= speed <= most:
            raise ConfigError(
                f"speeds must be integers between {least} and {most}, in thousandths of the "
                f"nominal speed, got {speed!r} for rank {rank}"
            )
    if not values:
        raise ConfigError("speeds must have one value for each rank, got none")
    slowest, fastest = min(values), max(values)
    if fastest > MAX_SPEED_RATIO * slowest:
        raise ConfigError(
            f"speeds must differ by at most a factor of {MAX_SPEED_RATIO}, got {slowest} for rank "
            f"{values.index(slowest)} and {fastest} for rank {values.index(fastest)}"
        )
    return values


@lru_cache(maxsize=256)
def _unless_equal(speeds: tuple[int, ...]) -> tuple[int, ...]:
    return speeds if len(set(speeds)) > 1 else ()


def two_digits(number: int) -> int:
    """Round a number to two significant digits.

    >>> two_digits(12_345), two_digits(96), two_digits(0), two_digits(9_960)
    (12000, 96, 0, 10000)
    """
    step: int = 10 ** max(0, len(str(number)) - 2)
    return (number + step // 2) // step * step


def tolerances_by_time(tolerance_parts: int) -> list[int]:
    """Return the tolerances that objective "time" tries, in millionths, smallest first."""
    return [tolerance_parts, *(parts for parts in LADDER if parts > tolerance_parts)]


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise if a value is not one of these choices."""
    if value not in list(choices):  # not hashed
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_integer(name: str, value: object, *, least: int, most: int = UNLIMITED) -> None:
    """Raise if a value is not an integer in this range."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value > most:
        raise ConfigError(f"{name} must be at most {most}, got {value}")


def check_timeout(seconds: float | None) -> None:
    """Raise if a timeout is not a positive number of seconds; None is allowed."""
    if seconds is not None and (
        not isinstance(seconds, (int, float)) or not 0 < seconds <= LONGEST_TIMEOUT
    ):
        raise ConfigError(
            f"timeout must be a positive number of seconds, at most {LONGEST_TIMEOUT:g}, "
            f"got {seconds!r}"
        )


def from_environment(config: BalanceConfig) -> BalanceConfig:
    """Return the config with the policy of the environment, and its rates instead of a measurement.

    ULTRAEP_POLICY=none switches balancing off in a program that cannot be changed.
    """
    policy = os.environ.get(POLICY_VARIABLE, "").strip()
    if policy and policy != config.policy:
        logger.info("%s=%s replaces the policy %r", POLICY_VARIABLE, policy, config.policy)
        config = replace(config, policy=policy)
    text = os.environ.get(RATES_VARIABLE, "").strip()
    if not text or config.objective != "time" or config.rates is not None:
        return config
    if text.lower() == OFF:
        return replace(config, objective="balance")
    try:
        return replace(config, rates=Rates.from_text(text))
    except ConfigError as error:
        raise ConfigError(
            f"the environment variable {RATES_VARIABLE} must be {OFF!r} or rates: {error}"
        ) from None
