"""`ultraep advise`: the best configuration for a cluster, and what balancing gains there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.table import Table
from rich.text import Text

from ultraep_tools.cli import options as cli
from ultraep_tools.cli import scenario as scenarios
from ultraep_tools.cli.terminal import Grid, Terminal, make_grid, progress
from ultraep_tools.report.words import counted
from ultraep_tools.sim.advise import Advice, Configuration
from ultraep_tools.sim.advise import advise as make_advice
from ultraep_tools.sim.cluster import GIGA
from ultraep_tools.sim.planes import AUTO
from ultraep_tools.sim.run import Result
from ultraep_tools.sim.serving import Serving

EXAMPLE = (
    "Example: ultraep advise --cluster h200-nvl8 --model gpt-oss-20b --ep 8 --imbalance 1.6\n\n"
    "Example: ultraep advise --trace routing.npz --cluster h200-nvl8 --model gpt-oss-20b --ep 8\n\n"
    "Example: ultraep advise --prefill stem --imbalance 3 --tokens 4096 --json"
)
STEPS = 2
ITERATIONS = 16
HEADERS = (
    *("configuration", "spare\nslots", "ms per\n{unit}", "tokens/s\nper device"),
    *("over no\nbalancing", "of forced\nbalance", "fullest\ndevice GB"),
)
TRUST = "These numbers are simulated; docs/simulator.md lists what the simulation omits."


class AdviseOptions(scenarios.ScenarioOptions):
    """A scenario that is simulated many times, so with fewer steps."""

    steps: int | None = cli.option("Training steps to simulate.", f"{STEPS}")
    as_json: bool = cli.json_option()


@cli.with_options
def command(options: AdviseOptions) -> None:
    """Recommend settings for a cluster before you rent it: does balancing pay there?

    Simulates no balancing and several numbers of spare slots on the same loads, and also with
    groups of one fast-link domain each if --ep spans several. Prints the best configuration first.
    """
    scenario = scenarios.make_scenario(options, steps=STEPS)
    if isinstance(scenario.job, Serving):
        scenario = replace(scenario, job=replace(scenario.job, iterations=ITERATIONS))
    processes = scenarios.processes_for(scenario, options.processes)
    with progress("simulating layers", lines=False) as report:
        advice = make_advice(scenario, processes=processes, report=report)
    if options.as_json:
        print(json.dumps(scenario.facts | _record(advice), indent=2))
    else:
        show(advice, scenarios.describe(scenario, imbalance=options.imbalance), Terminal())


def _record(advice: Advice) -> dict[str, Any]:
    return {
        "best": _facts(advice.best, advice.best.advised),
        "configurations": [
            _facts(configuration, result)
            for configuration in advice.configurations
            for result in configuration.results
        ],
        "gains_by_seed": advice.gains,
        "reasons": advice.reasons,
        "settings": _settings(advice.best),
    }


def _facts(configuration: Configuration, result: Result) -> dict[str, Any]:
    scenario = configuration.scenario
    sizes = {"ep": scenario.ranks, "data_plane": scenario.plane.name}
    return sizes | configuration.record(result)


# -- output --------------------------------------------------------------------------------------


def show(advice: Advice, heading: str, terminal: Terminal) -> None:
    terminal.print(Text.assemble(("Best: ", "bold"), f"{headline(advice)}\n"))
    terminal.print_faint(f"{heading}\n")
    terminal.print(_table(advice))
    terminal.print_faint("* best; forced balance: all experts equally loaded, an upper bound\n")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for row in _details(advice):
        grid.add_row(*row)
    terminal.print(grid)
    terminal.print_faint(f"\n{TRUST}")


def headline(advice: Advice) -> str:
    """Return the best configuration, then what balancing gains in the requested one."""
    best, requested = advice.best, advice.requested
    unit = requested.scenario.job.unit
    how = f"EP{best.scenario.ranks} {_with(best.advised)}, {_ms(best.advised)} per {unit}"
    if best is not requested:
        return f"{how}. Your EP{requested.scenario.ranks}: {_compared(advice)}."
    return f"{how}. {_compared(advice).capitalize()}."


def _with(result: Result) -> str:
    return f"with {counted(result.slots, 'spare slot')}" if result.slots else "without balancing"


def _compared(advice: Advice) -> str:
    """Return the times of the requested configuration without balancing and with it."""
    requested = advice.requested
    without, balanced = f"{_ms(requested.none)} without balancing", requested.best_balanced
    if balanced is None:
        return f"{without}, and no spare slot is possible"
    low, high = min(advice.gains), max(advice.gains)
    digits = 3 if abs(high - 1) < 0.05 else 2
    gain = f"{requested.gain(balanced):.{digits}f}x"
    if len(advice.gains) > 1:
        gain += f"; {low:.{digits}f}x to {high:.{digits}f}x with other seeds"
    text = f"{_ms(balanced)} {_with(balanced)}, {without} ({gain})"
    return text if requested.advised is balanced else f"{text}: balancing does not pay"


def _ms(result: Result) -> str:
    return f"{1e3 * result.seconds:,.0f} ms"


def _table(advice: Advice) -> Grid:
    """Return a line for every configuration and number of slots; mark the best."""
    unit = advice.requested.scenario.job.unit
    grid = make_grid([header.format(unit=unit) for header in HEADERS])
    for configuration in advice.configurations:
        scenario = configuration.scenario
        name = f"EP{scenario.ranks}, {scenario.plane.name}"
        for result in configuration.results:
            best = configuration is advice.best and result is configuration.advised
            short = "!" if result.out_of_memory else ""
            grid.add_row(
                f"{'*' if best else ''}{name}",
                str(result.slots or "none"),
                f"{1e3 * result.seconds:,.1f}",
                f"{result.tokens_per_second:,.0f}",
                f"{configuration.gain(result):.3f}x",
                f"{configuration.share(result):.1%}",
                f"{short}{result.memory.total / GIGA:.1f}",
                style="bold" if best else None,
            )
    return grid


def _details(advice: Advice) -> Iterator[tuple[str, str]]:
    best = advice.best
    for number, reason in enumerate(advice.reasons):
        yield "" if number else "Why", reason
    scenario = best.scenario
    slot = scenario.model.slot_bytes(training=scenario.job.trains) / GIGA
    yield "Memory", f"{slot:.2f} GB per spare slot, {scenario.cluster.memory_gb:g} GB per device"
    yield "Settings", _settings(best)


def _settings(best: Configuration) -> str:
    """Return the arguments of a Balancer."""
    if not best.advised.slots:
        return "no spare slots; leave balancing off"
    scenario = best.scenario
    size = scenario.topology.domain_size
    parts = [f"slots={best.advised.slots}"]
    if size < scenario.ranks:
        parts.append(f"domain={size}")
    if scenario.data_plane != AUTO:
        parts.append(f'data_plane="{scenario.data_plane}"')
    if scenario.objective != "time":  # the default of a balancer
        tolerance = f"tolerance={scenario.tolerance:g}"
        parts.append(f'config=ultraep.BalanceConfig(objective="balance", {tolerance})')
    return ", ".join(parts)
