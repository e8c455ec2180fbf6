"""Plans as tables and pictures for the terminal: functions of numbers that return renderables.

A skyline is a bar for every rank, in multiples of the mean load:

    2x |   #
    1x | : #--
       | # # :
       +-------
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
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

    def cut(self, highest: float) -> Scale:
        """The scale without the rows that stay empty above the mean."""
        if self.rows_to_mean < 1:
            return self
        return self._replace(rows=_rows(max(highest, 1.0), self.rows_to_mean))


def scale_for(highest: float) -> Scale:
    """A scale for loads up to `highest` times the mean, with the mean on the edge of a row."""
    if highest > 1.5 * HEIGHT:
        return Scale(HEIGHT, HEIGHT / highest)
    rows_to_mean = max(1, round(HEIGHT / highest))
    return Scale(_rows(highest, rows_to_mean), rows_to_mean)


def _rows(highest: float, rows_to_mean: float) -> int:
    """Rows that a bar reaches into, if it is drawn in eighths."""
    return math.ceil(round(8 * highest * rows_to_mean) / 8)


@dataclass(frozen=True, slots=True)
class Skyline:
    """A bar for every rank, or for every group of neighbours: the fullest of them."""

    heights: list[float]  # in multiples of the mean
    ranks: int
    domain: int
    bar: int  # columns of a bar
    gap: int  # columns after it
    scale: Scale
    glyphs: Glyphs = BLOCKS

    def text(self) -> Text:
        """The rows from the top down, then the axis; what stands above the mean is coloured."""
        picture = Text(no_wrap=True, overflow="crop")
        for row in reversed(range(self.scale.rows)):
            label = self._label(row)
            side = self.glyphs.mark if label else self.glyphs.side
            picture.append(f"{label:>{MARGIN - 2}} {side}", FAINT)
            cells = chain.from_iterable(self._cells(row, height) for height in self.heights)
            for style, run in groupby(cells, key=itemgetter(1)):
                picture.append("".join(text for text, _ in run), style)
            picture.append("\n")
        picture.append(f"{self.glyphs.corner:>{MARGIN}}{self._floor()}\n", FAINT)
        picture.append(f"{'':{MARGIN}}{self._rank_labels()}\n", FAINT)
        return picture

    def _cells(self, row: int, height: float) -> Iterator[tuple[str, str]]:
        """The part of a bar in one row; the mean shows in cells right below it that are empty."""
        to_mean, glyphs = self.scale.rows_to_mean, self.glyphs
        below_mean = row + 1 == to_mean
        empty = (glyphs.mean if below_mean else " ", FAINT)
        level = self._level(height * to_mean - row, row)
        bar = (glyphs.ramp[level], OVERFULL if row >= to_mean else CALM) if level else empty
        yield from [bar] * self.bar
        yield from [empty] * self.gap

    def _level(self, rows_left: float, row: int) -> int:
        """How full a cell is; a load above zero always shows."""
        full = len(self.glyphs.ramp) - 1
        least = 1 if row == 0 and rows_left > 0 else 0
        return min(max(round(rows_left * full), least), full)

    def _label(self, row: int) -> str:
        """Multiples of the mean where the upper edge of a row is one, else only mean and top."""
        to_mean = self.scale.rows_to_mean
        if to_mean >= 1:
            return "" if (row + 1) % to_mean else f"{(row + 1) / to_mean:.2f}x"
        if row + 1 == self.scale.rows:
            return f"{self.scale.rows / to_mean:.1f}x"
        return "mean" if row == 0 else ""

    def _floor(self) -> str:
        width = self.bar + self.gap
        floor = [self.glyphs.floor] * (width * len(self.heights))
        if len(self.heights) == self.ranks:
            for first in range(self.domain, self.ranks, self.domain):
                floor[width * first] = self.glyphs.border
        return "".join(floor)

    def _rank_labels(self) -> str:
        width = (self.bar + self.gap) * len(self.heights)
        last = str(self.ranks - 1)
        if self.ranks == 1:
            return "rank 0"
        if width < len("rank 0  ") + len(last):
            return f"ranks 0 to {last}"
        return "rank 0" + last.rjust(width - len("rank 0"))


def skyline(
    rank_loads: IntArray, scale: Scale, *, width: int, domain: int, glyphs: Glyphs = BLOCKS
) -> Skyline:
    """The skyline that fits into `width` columns."""
    ranks, mean = len(rank_loads), float(rank_loads.mean())
    group = group_of(ranks, width)
    fullest = [int(rank_loads[first : first + group].max()) for first in range(0, ranks, group)]
    heights = [tokens / mean if mean else 0.0 for tokens in fullest]
    bar, gap = (3, 1) if 4 * ranks <= min(width, 64) else (1, 0)
    cut = scale.cut(max(heights))
    return Skyline(heights, ranks, domain, bar=bar, gap=gap, scale=cut, glyphs=glyphs)


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
        + skyline(rank_loads, scale, **options, glyphs=glyphs_for(console)).text()
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
