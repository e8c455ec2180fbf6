"""Measurements of turns: percentiles of the time to first token (TTFT), throughput, gains.

A prompt without a first token counts as an infinite wait in every percentile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ultraep.tools.serving.load import Prompt

PERCENTILES = (50, 90, 99)
FORCED = "even"  # the variant with forced even routing


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One variant at one rate in one round. Lists have one entry per prompt.

    waited: TTFT in seconds; None without a first token.
    first: the first token or its logits, where known.
    seconds: until the last first token.
    before, after: imbalance over all rows of the turn; None if unknown.
    sent: bytes of replicas, all ranks.
    experts: CPU seconds of the busiest rank's experts, summed over layers.
    disturbed: share of the time in which other programs used the core of a rank.
    """

    variant: str
    rate: float
    number: int  # of the round
    waited: list[float | None]
    tokens: list[int]
    seconds: float
    first: list[Any] = field(default_factory=list)
    errors: Mapping[str, int] = field(default_factory=dict)
    microbatches: int = 0
    before: float | None = None
    after: float | None = None
    worst_before: float | None = None
    worst_after: float | None = None
    copies: int = 0
    sent: int = 0
    experts: float | None = None
    disturbed: float | None = None

    @classmethod
    def of(cls, prompts: Sequence[Prompt], ends: Sequence[float | None], **more: Any) -> Turn:
        """Return the turn of these prompts. ends: second of each first token."""
        pairs = zip(prompts, ends, strict=True)
        waited = [None if end is None else end - prompt.arrival for prompt, end in pairs]
        return cls(waited=waited, tokens=[prompt.tokens for prompt in prompts], **more)


@dataclass(frozen=True)
class UnderLoad:
    """All turns of one variant at one rate."""

    variant: str
    rate: float
    turns: tuple[Turn, ...]

    @cached_property
    def waited(self) -> list[float]:
        """TTFT of every prompt of all turns; infinite without a first token."""
        return [math.inf if w is None else w for turn in self.turns for w in turn.waited]

    def percentile(self, share: int) -> float | None:
        """A percentile of TTFT, which is a measured value; None if it is infinite."""
        seconds = float(np.percentile(self.waited, share, method="inverted_cdf"))
        return seconds if math.isfinite(seconds) else None

    @property
    def unanswered(self) -> int:
        """Prompts without a first token."""
        return sum(math.isinf(waited) for waited in self.waited)

    @property
    def seconds(self) -> float:
        """Duration of all turns."""
        return sum(turn.seconds for turn in self.turns)

    @property
    def throughput(self) -> float:
        """Answered prompts per second."""
        return (len(self.waited) - self.unanswered) / self.seconds if self.seconds else 0.0

    @property
    def tokens(self) -> int:
        """Tokens of answered prompts."""
        pairs = (pair for turn in self.turns for pair in zip(turn.waited, turn.tokens, strict=True))
        return sum(tokens for waited, tokens in pairs if waited is not None)

    def within(self, objective: float) -> float:
        """Share of all prompts whose TTFT met the objective."""
        return float(np.mean([waited <= objective for waited in self.waited]))

    def mean(self, name: str) -> float | None:
        """Mean of an attribute of the turns, such as "before"; None if unknown."""
        values = [getattr(turn, name) for turn in self.turns]
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else None


def under_load(turns: Sequence[Turn]) -> list[UnderLoad]:
    """Group turns by rate and variant; variants in the order of their first turns."""
    variants = list(dict.fromkeys(turn.variant for turn in turns))
    groups: dict[tuple[float, int], list[Turn]] = {}
    for turn in turns:
        groups.setdefault((turn.rate, variants.index(turn.variant)), []).append(turn)
    return [
        UnderLoad(variants[place], rate, tuple(groups[rate, place]))
        for rate, place in sorted(groups)
    ]


def gains(loads: Sequence[UnderLoad]) -> list[float | None]:
    """Median TTFT of the first variant at the same rate over the median TTFT of each variant."""
    first = {load.rate: load.percentile(50) for load in reversed(loads)}
    pairs = [(first[load.rate], load.percentile(50)) for load in loads]
    return [base / own if base and own else None for base, own in pairs]


def experts_per_token(turns: Sequence[Turn], variant: str) -> float | None:
    """CPU seconds per served token in the experts of the busiest rank."""
    own = tuple(turn for turn in turns if turn.variant == variant and turn.experts is not None)
    tokens = UnderLoad(variant, 0.0, own).tokens
    return sum(turn.experts or 0.0 for turn in own) / tokens if tokens else None


def agreement(turns: Sequence[Turn], variant: str) -> float | None:
    """Share of first tokens equal to the first tokens of the first variant in the same round."""
    base = {(t.rate, t.number): t.first for t in turns if t.variant == turns[0].variant}
    pairs = [
        (own, other)
        for turn in turns
        if turn.variant == variant
        for own, other in zip(turn.first, base.get((turn.rate, turn.number), ()), strict=False)
        if own is not None and other is not None
    ]
    return sum(own == other for own, other in pairs) / len(pairs) if pairs else None
