"""Tables and bars of plans for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from ultraep.arrays import IntArray
from ultraep.plan import Plan
from ultraep_tools.cli.terminal import Grid, Terminal, make_grid
from ultraep_tools.report.words import counted

BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-=*#"  # bars from low to high
CALM, OVERFULL = "cyan", "bold red"
MARGIN = 2


class Outcome(NamedTuple):
    """The plan of one microbatch. The number of the microbatch counts through all layers."""

    layer: int
    microbatch: int
    plan: Plan
    plan_us: float
    without_past: bool  # the policy plans from past loads, had none, and used the loads themselves


def glyphs_for(console: Console) -> str:
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


# -- bars ----------------------------------------------------------------------------------------


def bars(plans: Sequence[Plan], terminal: Terminal) -> Text:
    """Draw the ranks of a microbatch before and after every policy, on one scale."""
    unchanged = [plan.config.policy for plan in plans if not plan.num_replicas]
    lines = [(", ".join(["before", *unchanged]), "", plans[0].initial_rank_loads)]
    for plan in plans:
        if plan.num_replicas:
            replicas = f", {counted(plan.num_replicas, 'replica')}"
            lines.append((plan.config.policy, replicas, plan.rank_loads))
    highest = max(_over_mean(rank_loads) for _, _, rank_loads in lines)
    text = Text()
    for name, replicas, rank_loads in lines:
        busiest = _over_mean(rank_loads)
        text.append(name, "bold")
        text.append(f": busiest rank {busiest:.3f}x the mean{replicas}\n")
        style = CALM if busiest < highest else OVERFULL
        picture = _bars_of(rank_loads, highest, plans[0], terminal)
        text.append(f"{'':{MARGIN}}{picture}\n", style)
    return text


def _bars_of(rank_loads: IntArray, highest: float, plan: Plan, terminal: Terminal) -> str:
    """Draw a character for every rank, or for the busiest of several neighbours."""
    topology, glyphs = plan.topology, glyphs_for(terminal)
    mean = float(rank_loads.mean()) or 1.0
    group = ranks_per_bar(topology.ranks, terminal)
    ratios = [rank_loads[i : i + group].max() / mean for i in range(0, topology.ranks, group)]
    picture = sparkline(ratios, highest, glyphs, low=0.0)
    if group > 1 or topology.ranks + topology.num_domains > terminal.width - MARGIN:
        return picture
    size = topology.domain_size
    return " ".join(picture[i : i + size] for i in range(0, topology.ranks, size))


def ranks_per_bar(ranks: int, terminal: Terminal) -> int:
    return math.ceil(ranks / max(terminal.width - MARGIN, 1))


def legend(plan: Plan, terminal: Terminal) -> str:
    group = ranks_per_bar(plan.topology.ranks, terminal)
    each = "a bar for every rank" if group == 1 else f"each bar is the busiest of {group} ranks"
    return f"{each}; the mean is {plan.total / plan.topology.ranks:,.0f} rows per rank"


def _over_mean(rank_loads: IntArray) -> float:
    total = int(rank_loads.sum())
    return int(rank_loads.max()) * len(rank_loads) / total if total else 1.0


def sparkline(
    values: Sequence[float | None], high: float, glyphs: str = BLOCKS, *, low: float = 1.0
) -> str:
    """Draw one character per value, from the lowest bar at `low` to a full cell at `high`."""
    top, span = len(glyphs) - 1, (high - low) or 1.0
    heights = [(value - low) / span for value in values if value is not None]
    return "".join(glyphs[round(min(max(height, 0.0), 1.0) * top)] for height in heights)
