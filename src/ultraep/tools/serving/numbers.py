"""What was measured, as numbers to keep: rows like those of all benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from ultraep.tools.report.rows import MeasuredNumber, cpu_device, versions
from ultraep.tools.serving.measure import PERCENTILES, UnderLoad, experts_per_token, gains

Number = tuple[str, float | None, str]  # metric, value, unit


def rows_of(found: Sequence[UnderLoad], objective: float, command: str) -> list[MeasuredNumber]:
    """A row for every number that there is."""
    known = cpu_device(), versions(), command, datetime.now(UTC).date().isoformat()
    return [
        MeasuredNumber("prefill", _case(one), metric, float(f"{value:.7g}"), unit, *known)
        for one, gain in zip(found, gains(found), strict=True)
        for metric, value, unit in _numbers(one, gain, objective)
        if value is not None
    ]


def _case(one: UnderLoad) -> dict[str, str | int | float]:
    return {"policy": one.variant, "rate": one.rate, "prompts": len(one.waited)}


def _numbers(one: UnderLoad, gain: float | None, objective: float) -> Iterator[Number]:
    for share in PERCENTILES:
        yield f"first_token_p{share}", one.percentile(share), "s"
    yield "first_token_gain", gain, "ratio"
    yield "throughput", one.throughput, "prompts/s"
    yield "throughput_tokens", one.tokens_per_second, "tokens/s"
    yield f"within_{objective:g}_s", one.within(objective), "ratio"
    yield "unanswered", one.unanswered, "prompts"
    yield "imbalance_before", one.before, "ratio"
    yield "imbalance_after", one.after, "ratio"
    yield "copies", sum(turn.copies for turn in one.turns), "copies"
    yield "weights_sent", sum(turn.sent for turn in one.turns), "bytes"
    spent = experts_per_token(one.turns, one.variant)
    yield "experts_processor_time", None if spent is None else 1e3 * spent, "ms/token"
    yield "cores_taken_by_others", one.disturbed, "ratio"
