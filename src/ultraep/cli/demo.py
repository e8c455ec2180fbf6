"""`ultraep demo`: a tour of the planner for newcomers, on made-up loads.

Shapes: S microbatches, R ranks, E experts.
"""

from __future__ import annotations

from statistics import fmean
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from ultraep.arrays import IntArray
from ultraep.cli import render
from ultraep.cli.plan import Job, Slots, check_even, report, run
from ultraep.cli.render import Outcome
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.topology import Topology
from ultraep.workload import domain_shift, zipf

EXAMPLE = "Example: ultraep demo --ranks 16 --experts 64 --slots 2"
STEPS, WINDOW = 36, 4


def command(
    ranks: Annotated[int, typer.Option(help="Ranks of the expert-parallel group.")] = 64,
    experts: Annotated[
        int, typer.Option(help="Experts of the layer, a multiple of the ranks.")
    ] = 256,
    slots: Slots = 1,
    ratio: Annotated[
        float, typer.Option(help="How skewed the made-up loads are: fullest rank over mean rank.")
    ] = 3.0,
    seed: Annotated[int, typer.Option(help="Seed of the made-up loads.")] = 0,
) -> None:
    """Take a tour of the planner: skewed loads, copies of hot experts, balance.

    Loads are made up and nothing is run but the planner, on the CPU, in a few seconds.
    """
    check_even(ranks, experts)
    if seed < 0:
        raise ConfigError(f"--seed must not be negative, got {seed}")
    topology = Topology(ranks=ranks, experts=experts, slots=slots)
    console = render.make_console()
    loads = _skewed_loads(topology, ratio, seed)
    _show_problem(console, loads, topology)
    _show_balance(console, loads, topology)
    _show_tolerance(console, loads, topology)
    _show_shift(console, topology, seed)
    _show_next(console, ranks)


def _skewed_loads(topology: Topology, ratio: float, seed: int) -> IntArray:
    """[1, R, E] Zipf loads, with the ranks in random order."""
    ranks, experts = topology.ranks, topology.experts
    loads_RE = zipf(ranks, experts, ratio=ratio, top_k=_top_k(topology), seed=seed)
    order = np.random.default_rng(seed).permutation(ranks)
    blocks = loads_RE.reshape(ranks, ranks, experts // ranks)
    return blocks[:, order].reshape(1, ranks, experts)


def _top_k(topology: Topology) -> int:
    """Experts per token: eight, or fewer where that would be more than every fourth."""
    return min(8, max(topology.experts // 4, 1))


def _show_problem(console: Console, loads: IntArray, topology: Topology) -> None:
    _title(console, 1, "Skewed loads")
    _say(
        console,
        f"A Mixture-of-Experts layer: {topology.experts} experts have their homes on "
        f"{topology.ranks} ranks. The router sent them {loads.sum():,} tokens (a token counts "
        "once for each of its experts), and some are far more wanted than others. All ranks wait "
        "for the fullest. The loads here are made up, and only the planner runs, no model.",
    )


def _show_balance(console: Console, loads: IntArray, topology: Topology) -> None:
    _title(console, 2, "A plan")
    _say(
        console,
        f"Spare slots per rank: {topology.slots}. A plan puts copies of hot experts there, "
        "for this microbatch only, and gives each copy a quota: the tokens it serves. The rest "
        "stays at the home of its expert. Three policies, on the same loads:",
    )
    configs = {name: BalanceConfig(policy=name) for name in ("none", "quota", "ultraep")}
    outcomes = run(Job(loads=loads, topology=topology, configs=configs))
    report(outcomes, console)
    console.print()
    _say(
        console,
        "Imbalance is the fullest rank over the mean rank; no plan can go below the bound. "
        "Remote tokens are served by another rank than their own. "
        "Planning time is the median of a few calls on this CPU.",
    )


def _show_tolerance(console: Console, loads: IntArray, topology: Topology) -> None:
    _title(console, 3, "Fewer copies")
    _say(
        console,
        "A copy costs a transfer of weights. With a tolerance the planner stops that far above "
        "the mean and makes fewer:",
    )
    configs = {f"{percent} %": BalanceConfig(tolerance=percent / 100) for percent in (0, 1, 10)}
    outcomes = run(Job(loads=loads, topology=topology, configs=configs))
    console.print(render.table(outcomes, first="tolerance"))
    console.print()


def _show_shift(console: Console, topology: Topology, seed: int) -> None:
    _title(console, 4, "Loads that change")
    _say(
        console,
        f"Text moves from topic to topic, and the loads with it. Below are {STEPS - WINDOW} "
        f"microbatches of three topics. eplb places experts by the loads of the last {WINDOW} "
        "microbatches and may move them all; ultraep only copies, by the exact loads of each one:",
    )
    loads = domain_shift(
        topology.ranks,
        topology.experts,
        steps=STEPS,
        top_k=_top_k(topology),
        tokens=1024,
        seed=seed,
    )
    configs = {name: BalanceConfig(policy=name) for name in ("none", "eplb", "ultraep")}
    outcomes = run(Job(loads=loads, topology=topology, configs=configs, history=WINDOW))
    groups = render.by_label([o for o in outcomes if o.microbatch >= WINDOW])
    console.print(_lines(groups, render.glyphs_for(console)))
    _say(console, "One column is one microbatch: the higher, the more imbalanced.")


def _lines(groups: dict[str, list[Outcome]], glyphs: render.Glyphs) -> Text:
    """A sparkline of the imbalance for every policy, all on one scale."""
    values = {label: [o.plan.imbalance for o in group] for label, group in groups.items()}
    high = max(max(line) for line in values.values())
    text = Text(no_wrap=True, overflow="crop")
    for label, line in values.items():
        text.append(f"  {label:8}", "bold")
        text.append(render.sparkline(line, low=1.0, high=high, glyphs=glyphs), render.CALM)
        text.append(f"  mean {fmean(line):.3f}, worst {max(line):.3f}\n")
    return text


def _show_next(console: Console, ranks: int) -> None:
    _title(console, 5, "Next")
    for command, what in (
        (f"ultraep plan FILE --ranks {ranks}", "the same for loads of your own"),
        ("ultraep plan --help", "file formats, policies, domains, limits"),
        ("ultraep env", "versions, devices, backends and policies here"),
        ("docs/", "how the planner works, and why it is exact"),
    ):
        console.print(Text.assemble("  ", (f"{command:32}", "bold"), what))


def _title(console: Console, number: int, title: str) -> None:
    console.print(Text(f"{number}. {title}", "bold underline"))


def _say(console: Console, words: str) -> None:
    """A paragraph, no wider than is pleasant to read."""
    console.print(Text(words), width=min(console.width, 88))
    console.print()
