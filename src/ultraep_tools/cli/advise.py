"""`ultraep advise`: the best configuration for a cluster, and what balancing gains there."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ultraep_tools.cli import options as cli
from ultraep_tools.cli import scenario as scenarios
from ultraep_tools.cli.terminal import FAINT, Grid, Terminal, make_grid, progress
from ultraep_tools.report.words import counted
from ultraep_tools.sim.advise import OURS, Advice, Configuration
from ultraep_tools.sim.advise import advise as make_advice
from ultraep_tools.sim.cluster import GIGA
from ultraep_tools.sim.presets import presets
from ultraep_tools.sim.run import Result
from ultraep_tools.sim.runtime import IDEAL, NONE, runtime_of

EXAMPLE = (
    "Example: ultraep advise --cluster h200-nvl8 --model gpt-oss-20b --ep 8 --imbalance 1.6\n\n"
    "Example: ultraep advise --trace routing.npz --cluster h200-nvl8 --model gpt-oss-20b --ep 8\n\n"
    "Example: ultraep advise --policy eplb,quota --imbalance 3 --prefill --tokens 4096 --json"
)
HEADERS = (
    *("", "policy", "spare\nslots", "imbalance", "ms per\n{unit}", "over no\nbalancing"),
    *("of forced\nbalance", "device\nGB"),
)
ALWAYS = (NONE, IDEAL, OURS)  # compared without --policy
TRUST = "These numbers are simulated; docs/simulator.md lists what the simulation omits."


@cli.with_options
def command(options: scenarios.AdviseOptions) -> None:
    """Recommend settings for a cluster before you rent it: does balancing pay there?

    Simulates no balancing and several numbers of spare slots on the same loads, and also with
    groups of one fast-link domain each if --ep spans several. Prints the best configuration first.
    """
    if options.list_presets:
        print_presets(Terminal())
        return
    names = cli.split_names(options.policy, "--policy") if options.policy is not None else ()
    others = [name for name in names if name not in ALWAYS]
    for name in others:
        runtime_of(name)  # refuses a policy before the loads are fitted
    scenario = scenarios.make_scenario(options)
    with progress("simulating layers", lines=False) as report:
        advice = make_advice(scenario, others, report=report)
    if options.as_json:
        print(json.dumps(scenario.facts | _record(advice), indent=2))
    else:
        show(advice, scenarios.describe(scenario, imbalance=options.imbalance), Terminal())


def _record(advice: Advice) -> dict[str, object]:
    best = advice.best
    return {
        "best": best.record(best.advised),
        "configurations": [
            configuration.record(result)
            for configuration in advice.configurations
            for result in (configuration.none, *configuration.tried)
        ],
        "reasons": advice.reasons,
        "settings": _settings(best),
    }


# -- output --------------------------------------------------------------------------------------


def show(advice: Advice, heading: str, terminal: Terminal) -> None:
    terminal.print(Text.assemble(("Best: ", "bold"), f"{headline(advice)}\n"))
    terminal.print_faint(f"{heading}\n")
    terminal.print(_table(advice))
    terminal.print_faint("* best; ! out of memory; forced balance: all experts equally loaded\n")
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
    gain = requested.gain(balanced)
    digits = 3 if abs(gain - 1) < 0.05 else 2
    text = f"{_ms(balanced)} {_with(balanced)}, {without} ({gain:.{digits}f}x)"
    return text if requested.advised is balanced else f"{text}: balancing does not pay"


def _ms(result: Result) -> str:
    return f"{1e3 * result.seconds:,.0f} ms"


def _table(advice: Advice) -> Grid:
    """Return a line for every policy and number of slots; mark the best."""
    unit = advice.requested.scenario.job.unit
    grid = make_grid([header.format(unit=unit) for header in HEADERS])
    for configuration in advice.configurations:
        for result in _shown(configuration):
            best = configuration is advice.best and result is configuration.advised
            short = "!" if result.out_of_memory else ""
            grid.add_row(
                f"{'*' if best else ''}EP{configuration.scenario.ranks}",
                result.policy,
                str(result.slots or "-"),
                f"{result.imbalance:.3f}",
                f"{1e3 * result.seconds:,.1f}",
                f"{configuration.gain(result):.3f}x",
                f"{configuration.share(result):.1%}",
                f"{short}{result.memory.total / GIGA:.1f}",
                style="bold" if best else None,
            )
    return grid


def _shown(configuration: Configuration) -> Iterator[Result]:
    """Yield all results of ultraep, and the best one of every other policy."""
    yield configuration.none
    yield from configuration.balanced
    for policy in dict.fromkeys(result.policy for result in configuration.tried):
        best = configuration.best_of(policy)
        if best is not None and policy != OURS:
            yield best


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
    domain = f", domain={size}" if size < scenario.ranks else ""
    return f"slots={best.advised.slots}{domain}"


# -- presets -------------------------------------------------------------------------------------


def print_presets(terminal: Terminal) -> None:
    for group in ("clusters", "models"):
        terminal.print(Text(f"{group}  (--{group[:-1]} NAME)", "bold"))
        for name, table in presets(group).items():
            title = Text.assemble((name, "bold"), f"  {table['title']}")
            terminal.print(Padding(title, (0, 2)))
            terminal.print(Padding(Text(table["source"], FAINT), (0, 6)))
        terminal.print()
    terminal.print("Your own TOML file has tables of the same form: --cluster FILE.toml:NAME")
