"""Results of a load test: one sentence, a table, notes, rows of numbers, and a page with plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ultraep.files.writing import write_text
from ultraep.tools.report.numbers import Numbers, plain
from ultraep.tools.report.page import Page, plotly_js
from ultraep.tools.report.rows import MeasuredNumber, versions
from ultraep.tools.report.words import table as html_table
from ultraep.tools.serving.measure import (
    FORCED,
    PERCENTILES,
    Turn,
    UnderLoad,
    agreement,
    experts_per_token,
    gains,
    under_load,
)

QUIET = 0.03  # share of the time that other programs may use a core without a note
SHOWN = "ultraep"  # the variant of the headline, if it was measured
LEGEND = (
    "Times to first token are in seconds. sooner: median of the first policy over the median of "
    "this policy; served: first tokens per second; lost: prompts without a first token."
)


def headline(loads: Sequence[UnderLoad]) -> str:
    """One sentence: the median TTFT of `SHOWN` and of the first policy at the highest rate."""
    at_highest = [load for load in loads if load.rate == loads[-1].rate]
    policies = [load for load in at_highest if load.variant != FORCED] or at_highest
    first = at_highest[0]
    load = next((load for load in policies if load.variant == SHOWN), policies[-1])
    gain = gains(loads)[loads.index(load)]
    answer = f"First token after {_seconds(load.percentile(50))} s with {load.variant}"
    if load is not first and gain is not None:
        answer += f", {_seconds(first.percentile(50))} s with {first.variant} ({gain:.2f}x)"
    return f"{answer} at {load.rate:g} prompts/s"


def table(loads: Sequence[UnderLoad], objective: float) -> tuple[list[str], list[list[str]]]:
    """Head, and a row per variant and rate; times in seconds."""
    head = ["rate", "policy", *(f"p{share}" for share in PERCENTILES), "sooner", "served"]
    rows = []
    for load, gain in zip(loads, gains(loads), strict=True):
        before, after = load.mean("before"), load.mean("after")
        known = before is not None and after is not None
        rows.append(
            [
                f"{load.rate:g}/s",
                load.variant,
                *(_seconds(load.percentile(share)) for share in PERCENTILES),
                "-" if gain is None else f"{gain:.2f}x",
                f"{load.throughput:.2f}",
                f"{load.within(objective):.0%}",
                f"{before:.2f}->{after:.2f}" if known else "-",
                str(load.unanswered),
            ]
        )
    return [*head, f"in {objective:g} s", "imbalance", "lost"], rows


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def notes(turns: Sequence[Turn]) -> list[str]:
    """Errors, agreement of first tokens, CPU time of experts, and disturbed cores."""
    loads, base = under_load(turns), turns[0].variant
    lines = []
    for load in loads:
        errors = sum((Counter(turn.errors) for turn in load.turns), Counter[str]())
        if errors:
            counts = ", ".join(f"{count} {error}" for error, count in sorted(errors.items()))
            lines.append(f"{load.variant} at {load.rate:g}/s: {counts}")
    variants = dict.fromkeys(turn.variant for turn in turns)
    equal = {name: agreement(turns, name) for name in variants if name not in (base, FORCED)}
    if any(equal.values()):
        shares = ", ".join(f"{name} {share:.1%}" for name, share in equal.items() if share)
        lines.append(f"first tokens equal to {base}: {shares}")
    cpu_time = {name: experts_per_token(turns, name) for name in variants}
    if any(cpu_time.values()):
        times = ", ".join(f"{name} {1e3 * own:.3f} ms" for name, own in cpu_time.items() if own)
        lines.append(f"CPU time per token in the experts of the busiest rank: {times}")
    disturbed = max((load.mean("disturbed") or 0.0 for load in loads), default=0.0)
    if disturbed > QUIET:
        lines.append(
            f"other programs used the core of a rank up to {disturbed:.0%} of the time; measure "
            "again on idle cores"
        )
    return lines


def rows_of(
    loads: Sequence[UnderLoad], objective: float, command: str, device: str
) -> list[MeasuredNumber]:
    """A row per known number, in the format of all benchmarks."""
    origin = device, versions(), command, datetime.now(UTC).date().isoformat()
    rows = []
    for load, gain in zip(loads, gains(loads), strict=True):
        case: dict[str, str | int | float] = {
            "policy": load.variant,
            "rate": load.rate,
            "prompts": len(load.waited),
        }
        cpu_time = experts_per_token(load.turns, load.variant)
        numbers = [
            *((f"first_token_p{share}", load.percentile(share), "s") for share in PERCENTILES),
            ("first_token_gain", gain, "ratio"),
            ("throughput", load.throughput, "prompts/s"),
            ("throughput_tokens", load.tokens / load.seconds if load.seconds else 0.0, "tokens/s"),
            (f"within_{objective:g}_s", load.within(objective), "ratio"),
            ("unanswered", load.unanswered, "prompts"),
            ("imbalance_before", load.mean("before"), "ratio"),
            ("imbalance_after", load.mean("after"), "ratio"),
            ("copies", sum(turn.copies for turn in load.turns), "copies"),
            ("weights_sent", sum(turn.sent for turn in load.turns), "bytes"),
            ("experts_processor_time", None if cpu_time is None else 1e3 * cpu_time, "ms/token"),
            ("cores_taken_by_others", load.mean("disturbed"), "ratio"),
        ]
        for metric, value, unit in numbers:
            if value is not None:
                number = float(f"{value:.7g}")
                rows.append(MeasuredNumber("prefill", case, metric, number, unit, *origin))
    return rows


# -- page ----------------------------------------------------------------------------------------


def write_report(
    path: Path, turns: Sequence[Turn], objective: float, facts: Sequence[tuple[str, str]]
) -> None:
    """Write the page. facts: names and values of what was measured."""
    library = plotly_js()
    write_text(path, page(turns, objective, facts).html(library))


def page(turns: Sequence[Turn], objective: float, facts: Sequence[tuple[str, str]]) -> Page:
    """The page with all plots."""
    loads = under_load(turns)
    head, rows = table(loads, objective)
    return Page(
        report="serving",
        title=headline(loads),
        facts=facts,
        notes=notes(turns),
        tables={"result": f"<p>{LEGEND}</p>\n{html_table(head, rows, 'result')}"},
        numbers=all_numbers(loads, objective),
    )


def all_numbers(loads: Sequence[UnderLoad], objective: float) -> dict[str, Numbers]:
    """Numbers by plot: the values of every variant, rate by rate."""
    rates = sorted({load.rate for load in loads})
    variants = list(dict.fromkeys(load.variant for load in loads))
    measured = {(load.variant, load.rate): load for load in loads}

    def lines(**values: Callable[[UnderLoad], float | None]) -> Numbers:
        drawn = []
        for variant in variants:
            own = [measured.get((variant, rate)) for rate in rates]
            series = {
                name: plain([None if load is None else value(load) for load in own])
                for name, value in values.items()
            }
            drawn.append({"variant": variant, "label": variant} | series)
        return {"rates": rates, "lines": drawn}

    numbers = {
        "waits": lines(**{f"p{n}": lambda load, n=n: load.percentile(n) for n in PERCENTILES})
        | {"objective": objective},
        "served": lines(served=lambda load: load.throughput),
        "intime": lines(share=lambda load: load.within(objective)),
    }
    if any(load.mean("after") is not None for load in loads):
        numbers["loads"] = lines(
            before=lambda load: load.mean("before"), after=lambda load: load.mean("after")
        )
    return numbers
