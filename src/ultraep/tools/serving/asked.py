"""What is to be measured, checked before anything is started."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ultraep.errors import ConfigError
from ultraep.tools.serving.arrivals import Arrival, poisson, rate_of, stretched
from ultraep.tools.serving.prompts import Lengths, Prompt, make_prompts

ROUTINGS = ("own", "even")
LONGEST_TURN = 3600.0  # seconds
MOST_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class LoadAsked:
    """The load, whoever serves it.

    rates: prompts a second; empty: by `shares` of what the first variant can serve, or as the
        file of arrivals has them.
    seconds: of the arrivals of one turn.   rounds: turns of every variant at every rate.
    objective: seconds in which a first token is wanted.
    """

    rates: tuple[float, ...] = ()
    shares: tuple[float, ...] = (0.4, 0.8, 1.1, 1.4)
    seconds: float = 5.0
    rounds: int = 3
    lengths: Lengths = field(default_factory=lambda: Lengths(shortest=16, longest=256, burst=12))
    recorded: tuple[Arrival, ...] = ()
    objective: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, values in (("--rate", self.rates), ("--load", self.shares)):
            for value in values:
                if not 0 < value < math.inf:
                    raise ConfigError(f"{name} must be positive numbers, got {value:g}")
        for name, value in (("--seconds", self.seconds), ("--slo", self.objective)):
            if not 0 < value <= LONGEST_TURN:
                raise ConfigError(f"{name} must lie in 0 to {LONGEST_TURN:g}, got {value:g}")
        if self.rounds < 1:
            raise ConfigError(f"--rounds must be at least 1, got {self.rounds}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed must lie between 0 and 2**63 - 1, got {self.seed}")
        lengths = self.lengths
        if not 1 <= lengths.shortest <= lengths.longest:
            raise ConfigError(
                f"--shortest must lie between 1 and --longest, got {lengths.shortest} and "
                f"{lengths.longest}"
            )
        if lengths.burst < 1:
            raise ConfigError(f"--burst must be at least 1, got {lengths.burst}")

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest prompt that can come."""
        told = [arrival.tokens or 0 for arrival in self.recorded]
        drawn = any(arrival.tokens is None for arrival in self.recorded) or not self.recorded
        return max([*told, self.lengths.longest * drawn])

    def known_rates(self) -> tuple[float, ...]:
        """The rates, if they need no calibration."""
        return self.rates or ((rate_of(self.recorded),) if self.recorded else ())

    def prompts(self, rate: float, number: int, bytes_per_token: int) -> list[Prompt]:
        """Those of one round at one rate; the same for all variants."""
        seed = [self.seed, number]
        arrivals: Sequence[Arrival] = self.recorded
        if not arrivals:
            arrivals = poisson(rate, self.seconds, [*seed, round(1000 * rate)])
        elif math.isfinite(rate_of(arrivals)):
            arrivals = stretched(arrivals, rate)
        return make_prompts(arrivals, self.lengths, seed, bytes_per_token)

    def seconds_at(self, rate: float) -> float:
        """How long the arrivals of a turn take."""
        if not self.recorded:
            return self.seconds
        return len(self.recorded) / rate


@dataclass(frozen=True, kw_only=True)
class EngineAsked:
    """The engine: ranks of this machine that serve a model of transformers.

    model: folder of a checkpoint; None: random.   variants: what is compared.
    budget: most tokens of a rank in a microbatch; None: calibrated.
    routing: "own" of the model, or "even" for all variants.
    """

    load: LoadAsked
    variants: tuple[str, ...] = ("none", "eplb", "ultraep", "even")
    ranks: int = 2
    slots: int = 2
    model: str | None = None
    budget: int | None = None
    routing: str = "own"

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ConfigError(f"--ranks must lie between 1 and {MOST_RANKS}, got {self.ranks}")
        if self.slots < 0:
            raise ConfigError(f"--slots must not be negative, got {self.slots}")
        if self.budget is not None and self.budget < 1:
            raise ConfigError(f"--budget must be at least 1, got {self.budget}")
        if self.routing not in ROUTINGS:
            raise ConfigError(f"--routing is one of {', '.join(ROUTINGS)}, got {self.routing!r}")
