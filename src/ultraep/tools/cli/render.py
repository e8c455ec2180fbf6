"""Plans as tables and pictures for the terminal: functions of numbers that return renderables.

A skyline is a bar for every rank, in multiples of the mean load:

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
from ultraep.tools.cli.terminal import Grid, make_grid

HEIGHT = 8  # rows of a skyline, roughly: the mean is to lie on the edge of a row
MARGIN = 7  # columns left of the bars
CALM, OVERFULL, FAINT = "cyan", "bold red", "dim"


class Outcome(NamedTuple):
    """One microbatch, planned; `label` is the name of its line in the table."""

    label: str
    microbatch: int
    plan: Plan
    plan_us: float
    without_past: bool  # the policy places by past loads, had none, and saw the load itself


class Glyphs(NamedTuple):
    """What bars are drawn with."""

    ramp: str  # from an empty cell to a full one
    spark: str  # from low to high, in one row
    mean: str  # the mean, in an empty cell right below it
    side: str
    mark: str
    corner: str
    floor: str
    border: str  # on the floor, where a fast-link domain begins


BLOCKS = Glyphs(" ▁▂▃▄▅▆▇█", "▁▂▃▄▅▆▇█", "▔", "│", "┤", "└", "─", "┴")
ASCII = Glyphs(" .:#", "_.-=*#", "-", "|", "+", "+", "-", "+")


def glyphs_for(console: Console) -> Glyphs:
    """Blocks where the encoding of the terminal has them."""
    return ASCII if console.options.ascii_only else BLOCKS


# -- table ---------------------------------------------------------------------------------------


def by_label(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Group outcomes by policy, in the order in which the policies first appear."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.label, []).append(outcome)
    return groups


def table(outcomes: Sequence[Outcome]) -> Grid:
    """Return a line for every policy, with means and worst values of several microbatches."""
    groups = by_label(outcomes).values()
    several = any(len(group) > 1 for group in groups)
    rows = [_cells(group, several=several) for group in groups]
    grid = make_grid(*rows[0], padding=(0, 0, 0, 0 if several else 1))
    for cells in rows:
        grid.add_row(*cells.values())
    return grid


def _cells(outcomes: Sequence[Outcome], *, several: bool) -> dict[str, str]:
    """Return the cells of one policy by header."""
    plans = [outcome.plan for outcome in outcomes]
    mark = "" if all(plan.within_limits for plan in plans) else "*"
    before = [plan.initial_imbalance for plan in plans]
    after = [plan.imbalance for plan in plans]
    bound = f"{fmean(plan.lower_bound for plan in plans):.3f}"
    copies = fmean(plan.num_replicas for plan in plans)
    fanout = str(max(plan.max_fanout for plan in plans))
    ingress = str(max(plan.max_ingress for plan in plans))
    remote = f"{fmean(plan.remote_tokens / max(plan.total, 1) for plan in plans):.1%}"
    median_us = median(outcome.plan_us for outcome in outcomes)
    plan_us = f"{median_us:.1f}" if median_us < 100 else f"{median_us:.0f}"
    if not several:
        return {
            "policy": outcomes[0].label + mark,
            "before": f"{before[0]:.3f}",
            "after": f"{after[0]:.3f}",
            "bound": bound,
            "copies": f"{copies:.0f}",
            "max\nfan-out": fanout,
            "max\ningress": ingress,
            "remote\ntokens": remote,
            "planning\nus": plan_us,
        }
    return {
        "policy": outcomes[0].label + mark,
        "before\nmean": f"{fmean(before):.3f}",
        "before\nworst": f"{max(before):.3f}",
        "after\nmean": f"{fmean(after):.3f}",
        "after\nworst": f"{max(after):.3f}",
        "bound\nmean": bound,
        "copies\nmean": f"{copies:.1f}",
        "fan-out\nmax": fanout,
        "ingress\nmax": ingress,
        "remote\nmean": remote,
        "plan us\nmedian": plan_us,
    }


# -- skyline -------------------------------------------------------------------------------------


class Scale(NamedTuple):
    """The y axis that the skylines of one microbatch share."""

    rows: int
    rows_to_mean: float  # a whole number, or less than one if the mean is low in the first row

    def label(self, row: int) -> str:
        """Return the multiple of the mean at the upper edge of a row, if it is a whole one."""
        if self.rows_to_mean >= 1:
            multiple = (row + 1) / self.rows_to_mean
            return f"{multiple:.2f}x" if multiple.is_integer() else ""
        if row + 1 == self.rows:
            return f"{self.rows / self.rows_to_mean:.1f}x"
        return "mean" if row == 0 else ""


def scale_for(highest: float) -> Scale:
    """Return a scale for loads up to `highest` times the mean, with the mean on a row's edge."""
    if highest > 1.5 * HEIGHT:
        return Scale(HEIGHT, HEIGHT / highest)
    rows_to_mean = max(1, round(HEIGHT / highest))
    return Scale(_rows(highest, rows_to_mean), rows_to_mean)


def _rows(highest: float, rows_to_mean: float) -> int:
    """Return the rows that a bar reaches into, if it is drawn in eighths."""
    return math.ceil(round(8 * highest * rows_to_mean) / 8)


def skyline(
    rank_loads: IntArray, scale: Scale, *, width: int, domain: int, glyphs: Glyphs = BLOCKS
) -> Text:
    """Draw a bar for every rank, or for the fullest of neighbours where `width` is too small.

    The mean shows in the empty cells right below it; what stands above the mean is red.
    """
    ranks, mean = len(rank_loads), float(rank_loads.mean()) or 1.0
    group = group_of(ranks, width)
    heights = [rank_loads[first : first + group].max() / mean for first in range(0, ranks, group)]
    bar, gap = (3, 1) if 4 * ranks <= min(width, 64) else (1, 0)
    rows, to_mean = scale
    if to_mean >= 1:  # no empty rows above the mean
        rows = _rows(max(*heights, 1.0), to_mean)
    picture = Text(no_wrap=True, overflow="crop")
    for row in reversed(range(rows)):
        label = scale._replace(rows=rows).label(row)
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


def _level(rows_left: float, full: int, *, bottom: bool) -> int:
    """Return how full a cell is; a load above zero always shows."""
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
    """Ranks that share a column."""
    return math.ceil(ranks / max(width, 1))


def skylines(outcomes: Sequence[Outcome], console: Console) -> list[Text]:
    """One microbatch before, and after every policy that copies anything, on one scale."""
    plan = outcomes[0].plan
    idle = [outcome.label for outcome in outcomes if not outcome.plan.num_replicas]
    drawn = [(", ".join(["before", *idle]), "", plan.initial_rank_loads)]
    drawn += [
        (outcome.label, f", {outcome.plan.num_replicas} copies", outcome.plan.rank_loads)
        for outcome in outcomes
        if outcome.plan.num_replicas
    ]
    scale = scale_for(max(_over_mean(rank_loads) for _, _, rank_loads in drawn))
    options = {"width": console.width - MARGIN, "domain": plan.topology.domain_size}
    return [
        Text.assemble(
            (label, "bold"), f"  fullest rank {_over_mean(rank_loads):.3f}x the mean{copies}\n"
        )
        + skyline(rank_loads, scale, **options, glyphs=glyphs_for(console))
        for label, copies, rank_loads in drawn
    ]


def legend(plan: Plan, console: Console) -> Text:
    """What the skylines do not say themselves."""
    topology = plan.topology
    parts = [f"1.00x is the mean, {plan.total / topology.ranks:,.0f} tokens per rank"]
    group = group_of(topology.ranks, console.width - MARGIN)
    if group > 1:
        parts.append(f"each column is the fullest of {group} neighbouring ranks")
    elif topology.num_domains > 1:
        parts.append(f"a tick for each domain of {topology.domain_size} ranks")
    return Text("; ".join(parts), FAINT)


def _over_mean(rank_loads: IntArray) -> float:
    total = int(rank_loads.sum())
    return int(rank_loads.max()) * len(rank_loads) / total if total else 1.0


# -- sparkline -----------------------------------------------------------------------------------


def sparkline(values: Sequence[float], *, low: float, high: float, glyphs: Glyphs = BLOCKS) -> str:
    """One character per value, from `low`, the lowest bar, to `high`, a full cell."""
    levels = glyphs.spark
    span = (high - low) or 1.0
    return "".join(
        levels[round(min(max((value - low) / span, 0.0), 1.0) * (len(levels) - 1))]
        for value in values
    )
