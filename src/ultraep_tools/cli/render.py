"""Tables and bar charts of plans for the terminal.

A skyline has a bar for every rank, in multiples of the mean load:

    2x |   #
    1x | : #--
       | # # :
       +-------
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from ultraep.arrays import IntArray
from ultraep.plan import Plan
from ultraep_tools.cli.terminal import FAINT, Grid, Terminal, make_grid
from ultraep_tools.report.words import counted

HEIGHT = 8  # approximate rows of a skyline; the mean lies on the edge of a row
MARGIN = 7  # columns left of the bars
CALM, OVERFULL = "cyan", "bold red"


class Outcome(NamedTuple):
    """The plan of one microbatch. The number of the microbatch counts through all layers."""

    layer: int
    microbatch: int
    plan: Plan
    plan_us: float
    without_past: bool  # the policy plans from past loads, had none, and used the loads themselves


class Glyphs(NamedTuple):
    """Characters of bars and axes."""

    ramp: str  # from an empty cell to a full one
    spark: str  # from low to high, in one row
    mean: str  # in an empty cell right below the mean
    side: str
    mark: str
    corner: str
    floor: str
    border: str  # on the floor, where a fast-link domain begins


BLOCKS = Glyphs(" ▁▂▃▄▅▆▇█", "▁▂▃▄▅▆▇█", "▔", "│", "┤", "└", "─", "┴")
ASCII = Glyphs(" .:#", "_.-=*#", "-", "|", "+", "+", "-", "+")


def glyphs_for(console: Console) -> Glyphs:
    """Return block characters if the terminal's encoding has them."""
    return ASCII if console.options.ascii_only else BLOCKS


# -- table ---------------------------------------------------------------------------------------

HEADERS = (
    *("policy", "imbalance\nbefore", "imbalance\nafter", "lower\nbound", "\nreplicas"),
    *("max\nfan-out", "max\ningress", "remote\nrows", "plan\nus"),
)


def by_policy(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Group outcomes by policy, in the order in which the policies first appear."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.plan.config.policy, []).append(outcome)
    return groups


def table(outcomes: Sequence[Outcome]) -> Grid:
    """Return a line for every policy, with means over all microbatches."""
    return make_grid(HEADERS, map(_cells, by_policy(outcomes).values()), padding=0)


def _cells(outcomes: Sequence[Outcome]) -> list[str]:
    plans = [outcome.plan for outcome in outcomes]
    mark = "" if all(plan.within_limits for plan in plans) else "*"
    replicas = fmean(plan.num_replicas for plan in plans)
    plan_us = median(outcome.plan_us for outcome in outcomes)
    return [
        plans[0].config.policy + mark,
        _mean_and_worst([plan.initial_imbalance for plan in plans]),
        _mean_and_worst([plan.imbalance for plan in plans]),
        f"{fmean(plan.lower_bound for plan in plans):.3f}",
        f"{replicas:.0f}" if len(plans) == 1 else f"{replicas:.1f}",
        str(max(plan.max_fanout for plan in plans)),
        str(max(plan.max_ingress for plan in plans)),
        f"{fmean(plan.remote_tokens / max(plan.total, 1) for plan in plans):.1%}",
        f"{plan_us:.1f}" if plan_us < 100 else f"{plan_us:.0f}",
    ]


def _mean_and_worst(values: Sequence[float]) -> str:
    worst = f" ({max(values):.2f})" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{worst}"


# -- skyline -------------------------------------------------------------------------------------


def rows_to_mean(highest: float) -> float:
    """Return the rows from zero to the mean, for loads up to `highest` times the mean.

    An integer, or less than one if a very busy rank puts the mean into the first row.
    """
    return HEIGHT / highest if highest > 1.5 * HEIGHT else max(1, round(HEIGHT / highest))


def skyline(
    rank_loads: IntArray, to_mean: float, *, width: int, domain: int, glyphs: Glyphs = BLOCKS
) -> Text:
    """Draw a bar for every rank, or for the busiest of several where `width` is too small.

    Empty cells right below the mean mark it; the part of a bar above the mean is red.
    """
    ranks, mean = len(rank_loads), float(rank_loads.mean()) or 1.0
    group = group_of(ranks, width)
    heights = [rank_loads[first : first + group].max() / mean for first in range(0, ranks, group)]
    bar, gap = (3, 1) if 4 * ranks <= min(width, 64) else (1, 0)
    rows = HEIGHT
    if to_mean >= 1:  # no empty rows above the mean; bars are drawn in eighths
        rows = math.ceil(round(8 * max(*heights, 1.0) * to_mean) / 8)
    picture = Text(no_wrap=True, overflow="crop")
    for row in reversed(range(rows)):
        label = _row_label(row, rows, to_mean)
        side = glyphs.mark if label else glyphs.side
        picture.append(f"{label:>{MARGIN - 2}} {side}", FAINT)
        empty = glyphs.mean if row + 1 == to_mean else " "
        style = OVERFULL if row >= to_mean else CALM
        for height in heights:
            level = _level(height * to_mean - row, len(glyphs.ramp) - 1, bottom=row == 0)
            cell = (glyphs.ramp[level], style) if level else (empty, FAINT)
            picture.append(bar * cell[0], cell[1])
            picture.append(gap * empty, FAINT)
        picture.append("\n")
    floor = [glyphs.floor] * ((bar + gap) * len(heights))
    if group == 1:
        for first in range(domain, ranks, domain):
            floor[(bar + gap) * first] = glyphs.border
    picture.append(f"{glyphs.corner:>{MARGIN}}{''.join(floor)}\n", FAINT)
    picture.append(f"{'':{MARGIN}}{_rank_labels(ranks, len(floor))}\n", FAINT)
    return picture


def _row_label(row: int, rows: int, to_mean: float) -> str:
    """Return the multiple of the mean at a row's upper edge, if it is an integer."""
    if to_mean >= 1:
        multiple = (row + 1) / to_mean
        return f"{multiple:.2f}x" if multiple.is_integer() else ""
    if row + 1 == rows:
        return f"{rows / to_mean:.1f}x"
    return "mean" if row == 0 else ""


def _level(rows_left: float, full: int, *, bottom: bool) -> int:
    """Return how full a cell is; a load above zero is always visible."""
    least = 1 if bottom and rows_left > 0 else 0
    return min(max(round(rows_left * full), least), full)


def _rank_labels(ranks: int, width: int) -> str:
    last = str(ranks - 1)
    if ranks == 1:
        return "rank 0"
    if width < len("rank 0  ") + len(last):
        return f"ranks 0 to {last}"
    return "rank 0" + last.rjust(width - len("rank 0"))


def group_of(ranks: int, width: int) -> int:
    """Return the number of ranks that share a column."""
    return math.ceil(ranks / max(width, 1))


def skylines(plans: Sequence[Plan], terminal: Terminal) -> list[Text]:
    """Draw a microbatch before, and after every policy that replicates anything, on one scale."""
    unchanged = [plan.config.policy for plan in plans if not plan.num_replicas]
    pictures = [(", ".join(["before", *unchanged]), "", plans[0].initial_rank_loads)]
    for plan in plans:
        if plan.num_replicas:
            replicas = f", {counted(plan.num_replicas, 'replica')}"
            pictures.append((plan.config.policy, replicas, plan.rank_loads))
    to_mean = rows_to_mean(max(_over_mean(rank_loads) for _, _, rank_loads in pictures))
    options = {"width": terminal.width - MARGIN, "domain": plans[0].topology.domain_size}
    return [
        Text.assemble(
            (name, "bold"), f"  busiest rank {_over_mean(rank_loads):.3f}x the mean{replicas}\n"
        )
        + skyline(rank_loads, to_mean, **options, glyphs=glyphs_for(terminal))
        for name, replicas, rank_loads in pictures
    ]


def legend(plan: Plan, terminal: Terminal) -> str:
    topology = plan.topology
    parts = [f"1.00x is the mean, {plan.total / topology.ranks:,.0f} rows per rank"]
    group = group_of(topology.ranks, terminal.width - MARGIN)
    if group > 1:
        parts.append(f"each column is the busiest of {group} neighbouring ranks")
    elif topology.num_domains > 1:
        parts.append(f"a tick for each domain of {topology.domain_size} ranks")
    return "; ".join(parts)


def _over_mean(rank_loads: IntArray) -> float:
    total = int(rank_loads.sum())
    return int(rank_loads.max()) * len(rank_loads) / total if total else 1.0


# -- sparkline -----------------------------------------------------------------------------------


def sparkline(values: Sequence[float | None], high: float, glyphs: Glyphs = BLOCKS) -> str:
    """Draw one character per imbalance, from 1 (lowest bar) to `high` (full cell)."""
    top, span = len(glyphs.spark) - 1, (high - 1) or 1.0
    heights = [(value - 1) / span for value in values if value is not None]
    return "".join(glyphs.spark[round(min(max(height, 0.0), 1.0) * top)] for height in heights)
