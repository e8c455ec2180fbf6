"""`ultraep advise`: does balancing pay on a cluster, and with which settings?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ultraep.tools.cli import render
from ultraep.tools.cli import scenario as scenarios
from ultraep.tools.cli.options import ScenarioOptions, with_options
from ultraep.tools.cli.progress import progress
from ultraep.tools.cli.terminal import Grid, count, make_console, make_grid
from ultraep.tools.sim.advise import (
    CLEAR_GAIN,
    DOES_NOT_PAY,
    PROBE_TOKENS,
    TOLERANCES,
    Advice,
    BreakEven,
)
from ultraep.tools.sim.advise import advise as ask
from ultraep.tools.sim.scenario import Scenario
from ultraep.tools.sim.serving import Serving

EXAMPLE = (
    "Example: ultraep advise --cluster h200-nvl8 --model gpt-oss-20b --ep 8 --imbalance 1.6\n\n"
    "Example: ultraep advise --trace routing.npz --cluster h200-nvl8 --model gpt-oss-20b --ep 8\n\n"
    "Example: ultraep advise --prefill stem --imbalance 3 --tokens 4096 --json"
)
STEPS = 2
ITERATIONS = 16
GB = 1e9
TRUST = "A simulation: docs/simulator.md tells what it leaves out and how well it predicts."


# -- options -------------------------------------------------------------------------------------

AsJson = Annotated[
    bool, typer.Option("--json", help="Print only one JSON object with all figures.")
]


@dataclass(frozen=True, kw_only=True)
class AdviseOptions(ScenarioOptions):
    """What is simulated again and again, so with fewer steps."""

    steps: Annotated[
        int | None, typer.Option(help="Training steps to simulate.", show_default=f"{STEPS}")
    ] = None


@with_options(AdviseOptions)
def command(options: AdviseOptions, as_json: AsJson = False) -> None:
    """Advise on a cluster before it is rented: does balancing pay, and with which settings?

    Tries spare slots (and tolerances, with --objective balance) on the same loads, and says what
    the best of them bring, from how many tokens per rank on, what it costs in memory, and why.
    """
    if options.steps is None and options.prefill is None:
        options = replace(options, steps=STEPS)
    scenario = scenarios.make_scenario(options)
    if isinstance(scenario.job, Serving):
        scenario = replace(scenario, job=replace(scenario.job, iterations=ITERATIONS))
    processes = scenarios.processes_for(scenario, options.processes)
    with progress("trying settings", lines=False) as tell:
        advice = ask(scenario, processes=processes, report=tell)
    if as_json:
        print(json.dumps(asdict(advice), indent=2))
    else:
        heading = scenarios.describe(scenario, imbalance=options.imbalance, slots=False)
        show(advice, scenario, heading, make_console())


# -- showing -------------------------------------------------------------------------------------


def show(advice: Advice, scenario: Scenario, heading: str, console: Console) -> None:
    """Print the verdict, all settings that were tried, then the figures."""
    name, sentence = verdict(advice)
    console.print(Text.assemble((name, "bold"), f": {sentence}\n"))
    console.print(Text(f"{heading}\n", render.FAINT))
    if advice.options:
        console.print(settings_table(advice))
        advised = "the best, though it does not pay"
        if advice.verdict != DOES_NOT_PAY:
            advised = "advised, the fewest slots near the best"
        console.print(Text(f"Share of ideal, forced balance; * {advised}.\n", render.FAINT))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for row in _figures(advice, scenario):
        grid.add_row(*row)
    console.print(grid)
    console.print(Text(f"\n{TRUST}", render.FAINT))


def verdict(advice: Advice) -> tuple[str, str]:
    """Return the verdict, and one sentence with its figures."""
    name, option, gain = advice.verdict.capitalize(), advice.option, advice.gain
    if option is None:
        return name, "there is no place for a copy."
    digits = 3 if abs(gain.overall - 1) < 0.05 else 2
    low, overall, high = (f"{x:.{digits}f}x" for x in (gain.low, gain.overall, gain.high))
    how = "plans by time" if _by_time(advice) else f"tolerance {option.tolerance:g}"
    brings = "would bring" if advice.verdict == DOES_NOT_PAY else "bring"
    return name, (
        f"{count(option.slots, 'spare slot')} and {how} {brings} {overall} ({low} to {high}) the "
        f"throughput of no balancing: {option.share:.1%} of ideal instead of "
        f"{advice.none.share:.1%}."
    )


def settings_table(advice: Advice) -> Grid:
    """Return shares of ideal by slots and tolerance; the best settings are marked."""
    columns = ["plans by time"]
    if not _by_time(advice):
        columns = [f"tolerance {tolerance:g}" for tolerance in TOLERANCES]
    grid = make_grid("spare slots", *columns)
    grid.add_row("0, no balancing", f"{advice.none.share:.1%} ", *[""] * (len(columns) - 1))
    for slots in sorted({option.slots for option in advice.options}):
        cells = [
            Text(f"{option.share:.1%}*", "bold")
            if option == advice.option
            else Text(f"{option.share:.1%} ")
            for option in advice.options
            if option.slots == slots
        ]
        grid.add_row(str(slots), *cells)
    return grid


def _figures(advice: Advice, scenario: Scenario) -> Iterator[tuple[str, str]]:
    """Yield name and text of every figure and reason."""
    option, gain, memory = advice.option, advice.gain, advice.memory
    slots = f"{memory.slot / GB:.2f} GB per spare slot"
    needs = f"the fullest device needs {memory.none / GB:,.1f} GB without balancing"
    if option is not None:
        low, high = gain.microbatches
        spread = f"{low:.3f}x to {high:.3f}x for the middle 80 % of {scenario.microbatches} "
        seeds = ", ".join(f"{draw:.3f}x" for draw in gain.draws[1:])
        yield (
            "Gain",
            f"{gain.overall:.3f}x; {spread}{scenario.job.units}"
            + (f"; {seeds} with other seeds" if seeds else ""),
        )
        yield (
            "Throughput",
            f"{advice.none.throughput:,.1f} without balancing, {option.throughput:,.1f} with it, "
            f"{advice.ideal_throughput:,.1f} ideal; {advice.unit}",
        )
        per = f"tokens per rank and {scenario.job.unit}"
        yield (
            "Break-even",
            f"{_tokens(advice.break_even)} {per}; {CLEAR_GAIN:g}x: {_tokens(advice.clear_gain)} "
            f"(here: {advice.tokens:,})",
        )
        slots = f"{memory.slots / GB:.2f} GB for {count(option.slots, 'spare slot')}"
        needs += f", {memory.balanced / GB:,.1f} GB with it"
    yield "Memory", f"{slots}; {needs}, of {memory.device / GB:g} GB"
    for number, reason in enumerate(advice.reasons):
        yield "" if number else "Why", reason
    yield "Left to ideal", advice.remainder
    yield "Settings", _copyable(advice)


def _tokens(even: BreakEven | None) -> str:
    if even is None or even.tokens is None:
        return f"more than {PROBE_TOKENS[-1]:,}"
    if even.always:
        return f"at most {PROBE_TOKENS[0]}"
    return f"about {int(float(f'{even.tokens:.2g}')):,}"


def _copyable(advice: Advice) -> str:
    """Return the arguments of a Balancer."""
    if advice.verdict == DOES_NOT_PAY:
        return "no spare slots; leave balancing off"
    domain = f", domain={advice.domain}" if advice.domain < advice.ranks else ""
    if _by_time(advice):  # the default of a balancer
        return f"slots={advice.slots}{domain}"
    config = f'ultraep.BalanceConfig(objective="balance", tolerance={advice.tolerance:g})'
    return f"slots={advice.slots}{domain}, config={config}"


def _by_time(advice: Advice) -> bool:
    return advice.objective == "time"
