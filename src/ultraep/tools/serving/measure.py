"""Waiting times -> what is told of them: percentiles, throughput, share within the objective.

A prompt that got no first token has waited for ever: it counts in every percentile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ultraep.tools.serving.prompts import Prompt

PERCENTILES = (50, 90, 99)
LONG_AFTER = 1.2  # times as long as prompts arrived


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One variant at one rate in one round. Lists have an entry for every prompt.

    waited: seconds to the first token; None: there was none.   first: that token, where known.
    arrived: the second of the last arrival.   seconds: until the last first token.
    """

    variant: str
    rate: float
    number: int  # of the round
    waited: list[float | None]
    tokens: list[int]
    arrived: float
    seconds: float
    first: list[int | None] = field(default_factory=list)
    errors: Mapping[str, int] = field(default_factory=dict)
    microbatches: int = 0
    before: float | None = None  # imbalance, weighted by rows; None: not known
    after: float | None = None
    copies: int = 0
    sent: int = 0  # bytes of copies, all ranks
    experts: float | None = None  # seconds of the processor that worked longest, layer by layer
    disturbed: float | None = None  # share of the time in which others had the core of a rank


@dataclass(frozen=True)
class UnderLoad:
    """All turns of one variant at one rate."""

    variant: str
    rate: float
    turns: tuple[Turn, ...]

    @cached_property
    def waited(self) -> list[float]:
        """Seconds of every prompt of all turns; infinite without a first token."""
        return [math.inf if w is None else w for turn in self.turns for w in turn.waited]

    def percentile(self, share: int) -> float | None:
        """Seconds to the first token that so many of a hundred had; None: they had none.

        A time that was measured, not one between two of them.
        """
        found = float(np.percentile(self.waited, share, method="inverted_cdf"))
        return found if math.isfinite(found) else None

    @property
    def answered(self) -> int:
        return sum(math.isfinite(waited) for waited in self.waited)

    @property
    def unanswered(self) -> int:
        return len(self.waited) - self.answered

    @property
    def seconds(self) -> float:
        return sum(turn.seconds for turn in self.turns)

    @property
    def throughput(self) -> float:
        """Answered prompts a second."""
        return self.answered / self.seconds if self.seconds else 0.0

    @property
    def saturated(self) -> bool:
        """Whether serving went on for long after the last arrival: more came than was served."""
        drawn = sum(turn.arrived for turn in self.turns)
        return self.seconds > LONG_AFTER * max(drawn, len(self.waited) / self.rate)

    @property
    def served_tokens(self) -> int:
        """Tokens of answered prompts."""
        return sum(
            count
            for turn in self.turns
            for waited, count in zip(turn.waited, turn.tokens, strict=True)
            if waited is not None
        )

    @property
    def tokens_per_second(self) -> float:
        """Tokens of answered prompts a second."""
        return self.served_tokens / self.seconds if self.seconds else 0.0

    def within(self, objective: float) -> float:
        """The share of all prompts whose first token came in time."""
        return float(np.mean([waited <= objective for waited in self.waited]))

    @property
    def errors(self) -> Counter[str]:
        return sum((Counter(turn.errors) for turn in self.turns), Counter())

    @property
    def before(self) -> float | None:
        return _mean(turn.before for turn in self.turns)

    @property
    def after(self) -> float | None:
        return _mean(turn.after for turn in self.turns)

    @property
    def disturbed(self) -> float | None:
        return _mean(turn.disturbed for turn in self.turns)


def waits(prompts: Sequence[Prompt], ends: Sequence[float | None]) -> list[float | None]:
    """Seconds from every arrival to its end; None: there was none."""
    pairs = zip(prompts, ends, strict=True)
    return [None if end is None else end - prompt.arrival for prompt, end in pairs]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def under_load(turns: Sequence[Turn]) -> list[UnderLoad]:
    """Turns by rate and variant, in the order in which these came first."""
    variants = list(dict.fromkeys(turn.variant for turn in turns))
    groups: dict[tuple[float, int], list[Turn]] = {}
    for turn in turns:
        groups.setdefault((turn.rate, variants.index(turn.variant)), []).append(turn)
    return [
        UnderLoad(variants[place], rate, tuple(groups[rate, place]))
        for rate, place in sorted(groups)
    ]


def experts_per_token(turns: Sequence[Turn], variant: str) -> float | None:
    """Seconds of the processor for a served token in the experts of the fullest rank."""
    own = [turn for turn in turns if turn.variant == variant and turn.experts is not None]
    tokens = sum(UnderLoad(variant, turn.rate, (turn,)).served_tokens for turn in own)
    return sum(turn.experts or 0.0 for turn in own) / tokens if tokens else None


def gains(found: Sequence[UnderLoad], share: int = 50) -> list[float | None]:
    """How many times sooner than the first variant at the same rate; None: one had no token."""
    first = {one.rate: one for one in reversed(found)}
    pairs = [(first[one.rate].percentile(share), one.percentile(share)) for one in found]
    return [base / own if base and own else None for base, own in pairs]


def agreement(turns: Sequence[Turn], variant: str) -> float | None:
    """The share of first tokens that are those of the first variant in the same round."""
    base = {(t.rate, t.number): t.first for t in turns if t.variant == turns[0].variant}
    pairs = [
        (own, other)
        for turn in turns
        if turn.variant == variant
        for own, other in zip(turn.first, base.get((turn.rate, turn.number), ()), strict=False)
        if own is not None and other is not None
    ]
    return sum(own == other for own, other in pairs) / len(pairs) if pairs else None
