"""What it comes to, in sentences, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Sequence

from ultraep.tools.report.words import listed
from ultraep.tools.serving.measure import Turn, UnderLoad, agreement, experts_per_token, gains
from ultraep.tools.serving.variants import EPLB, FORCED

QUIET = 0.03  # share of the time that others may have a core
NAMES = {FORCED: "forced even", EPLB: "eplb, fixed homes"}


def name_of(variant: str) -> str:
    """A variant, as it is told."""
    return NAMES.get(variant, variant)


def seconds(value: float | None) -> str:
    """A time to the first token.

    >>> seconds(0.1234), seconds(12.34), seconds(None)
    ('0.123 s', '12.3 s', 'never')
    """
    if value is None:
        return "never"
    return f"{value:.3f} s" if value < 10 else f"{value:.3g} s"


def times(gain: float | None) -> str:
    """How much sooner.

    >>> times(1.234), times(None)
    ('1.23x', '-')
    """
    return "-" if gain is None else f"{gain:.2f}x"


def verdict(found: Sequence[UnderLoad]) -> list[str]:
    """A sentence for the lowest rate, and one for the highest."""
    rates = sorted({one.rate for one in found})
    return [_at(found, rate) for rate in dict.fromkeys((rates[0], rates[-1]))]


def _at(found: Sequence[UnderLoad], rate: float) -> str:
    there = [(one, gain) for one, gain in zip(found, gains(found), strict=True) if one.rate == rate]
    first, others = there[0][0], there[1:]
    full = f", more than the {first.throughput:.3g} that are served" if first.saturated else ""
    parts = [
        f"{seconds(one.percentile(50))} with {name_of(one.variant)} ({times(gain)})"
        for one, gain in others
    ]
    told = f", {listed(parts)}" if parts else ""
    return (
        f"At {rate:g} prompts a second{full}, the first token comes after "
        f"{seconds(first.percentile(50))} with {name_of(first.variant)}{told}, in the median."
    )


def notes(turns: Sequence[Turn], found: Sequence[UnderLoad]) -> list[str]:
    """What to know about the figures: errors, other first tokens, cores that others had."""
    told = [
        f"{name_of(one.variant)} at {one.rate:g}/s: {_errors(one)}" for one in found if one.errors
    ]
    for variant in dict.fromkeys(turn.variant for turn in turns[1:]):
        share = None if variant == FORCED else agreement(turns, variant)
        if share is not None and variant != turns[0].variant:
            told.append(
                f"first tokens of {name_of(variant)} equal to {turns[0].variant}: {share:.1%}"
            )
    told += _experts(turns)
    taken = max((one.disturbed or 0.0 for one in found), default=0.0)
    if taken > QUIET:
        told.append(
            f"others had a core of a rank up to {taken:.0%} of the time: measure on idle cores"
        )
    return told


def _experts(turns: Sequence[Turn]) -> list[str]:
    """Processor time in the experts, which others on this machine hardly change."""
    variants = list(dict.fromkeys(turn.variant for turn in turns))
    spent = {variant: experts_per_token(turns, variant) for variant in variants}
    first = spent[turns[0].variant]
    parts = [
        f"{name_of(variant)} {1e3 * own:.3f} ms ({times(first and first / own)})"
        for variant, own in spent.items()
        if own
    ]
    return [f"processor time of a token in experts, fullest rank: {listed(parts)}"] if parts else []


def _errors(one: UnderLoad) -> str:
    return listed([f"{count} {kind}" for kind, count in sorted(one.errors.items())])
