"""`ultraep advise`: does balancing pay on a cluster, and with which settings?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace

from rich.table import Table
from rich.text import Text

from ultraep_tools.cli import options as cli
from ultraep_tools.cli import scenario as scenarios
from ultraep_tools.cli.terminal import Grid, Terminal, make_grid, progress
from ultraep_tools.report.words import counted
from ultraep_tools.sim.advise import CLEAR_GAIN, DOES_NOT_PAY, TOLERANCES, Advice, Option
from ultraep_tools.sim.advise import advise as make_advice
from ultraep_tools.sim.gains import PROBE_TOKENS, BetweenDomains, BreakEven, PlaneTime
from ultraep_tools.sim.planes import AUTO
from ultraep_tools.sim.scenario import Scenario
from ultraep_tools.sim.serving import Serving

EXAMPLE = (
    "Example: ultraep advise --cluster h200-nvl8 --model gpt-oss-20b --ep 8 --imbalance 1.6\n\n"
    "Example: ultraep advise --trace routing.npz --cluster h200-nvl8 --model gpt-oss-20b --ep 8\n\n"
    "Example: ultraep advise --cluster h200-nvl8 --model gpt-oss-120b --ep 16 --imbalance 2\n\n"
    "Example: ultraep advise --prefill stem --imbalance 3 --tokens 4096 --json"
)
STEPS = 2
ITERATIONS = 16
GB = 1e9
TRUST = "These numbers are simulated; docs/simulator.md lists what the simulation omits."


class AdviseOptions(scenarios.ScenarioOptions):
    """A scenario that is simulated many times, so with fewer steps."""

    steps: int | None = cli.option("Training steps to simulate.", f"{STEPS}")
    as_json: bool = cli.json_option()


@cli.with_options
def command(options: AdviseOptions) -> None:
    """Recommend settings for a cluster before you rent it: does balancing pay there?

    Simulates several numbers of spare slots (and tolerances, with --objective balance) on the same
    loads. Prints the gain of the best settings, the time of every data plane, the tokens per rank
    from which balancing pays, its memory and the reasons.
    """
    scenario = scenarios.make_scenario(options, steps=STEPS)
    if isinstance(scenario.job, Serving):
        scenario = replace(scenario, job=replace(scenario.job, iterations=ITERATIONS))
    processes = scenarios.processes_for(scenario, options.processes)
    with progress("trying settings", lines=False) as report:
        advice = make_advice(scenario, processes=processes, report=report)
    if options.as_json:
        sizes = {"ranks": scenario.ranks, "tokens": scenario.job.tokens}
        print(json.dumps({**scenario.facts, **sizes, **asdict(advice)}, indent=2))
    else:
        heading = scenarios.describe(scenario, imbalance=options.imbalance, slots=False)
        show(advice, scenario, heading, Terminal())


# -- output --------------------------------------------------------------------------------------


def show(advice: Advice, scenario: Scenario, heading: str, terminal: Terminal) -> None:
    name, sentence = verdict(advice, scenario)
    terminal.print(Text.assemble((name, "bold"), f": {sentence}\n"))
    terminal.print_faint(f"{heading}\n")
    if advice.options:
        terminal.print(settings_table(advice, scenario))
        mark = "best, though it does not pay"
        if advice.verdict != DOES_NOT_PAY:
            mark = "recommended: the fewest slots close to the best"
        terminal.print_faint(f"Throughput relative to forced balance; * {mark}.\n")
    terminal.print(planes_table(advice))
    per = f"Milliseconds per {scenario.job.unit}, over all layers with experts"
    terminal.print_faint(f"{per}; * most tokens per second.\n")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for row in _details(advice, scenario):
        grid.add_row(*row)
    terminal.print(grid)
    terminal.print_faint(f"\n{TRUST}")


def verdict(advice: Advice, scenario: Scenario) -> tuple[str, str]:
    """Return the verdict, and one sentence with its numbers."""
    name, best, gain = advice.verdict.capitalize(), advice.option, advice.gain
    if best is None:
        return name, "no device has memory for a spare slot."
    digits = 3 if abs(gain.overall - 1) < 0.05 else 2
    low, overall, high = (f"{x:.{digits}f}x" for x in (gain.low, gain.overall, gain.high))
    how = "plans by time" if scenario.objective == "time" else f"tolerance {best.tolerance:g}"
    reach = "would reach" if advice.verdict == DOES_NOT_PAY else "reach"
    return name, (
        f"{counted(best.slots, 'spare slot')} and {how} {reach} {overall} ({low} to {high}) the "
        f"throughput of no balancing: {best.share:.1%} of forced balance instead of "
        f"{advice.none.share:.1%}."
    )


def settings_table(advice: Advice, scenario: Scenario) -> Grid:
    """Return the share of forced balance by slots and tolerance; mark the best settings."""
    columns = ["plans by time"]
    if scenario.objective != "time":
        columns = [f"tolerance {tolerance:g}" for tolerance in TOLERANCES]
    grid = make_grid(["spare slots", *columns])
    grid.add_row("0, no balancing", f"{advice.none.share:.1%}", *[""] * (len(columns) - 1))
    for slots in sorted({setting.slots for setting in advice.options}):
        settings = [setting for setting in advice.options if setting.slots == slots]
        grid.add_row(str(slots), *(_share(setting, advice) for setting in settings))
    return grid


def _share(setting: Option, advice: Advice) -> Text:
    share = f"{setting.share:.1%}"
    return Text(f"*{share}", "bold") if setting == advice.option else Text(share)


def planes_table(advice: Advice) -> Grid:
    """Return the times of all data planes; mark the one with the most tokens per second."""
    headers = ["data plane", "rows that cross\nper token", "ms without\nbalancing"]
    grid = make_grid([*headers, "ms\nbalanced", "tokens/s\nper device"])
    for plane in advice.planes:
        best = plane == _fastest(advice)
        name = f"{'*' if best else ''}{plane.plane}, EP{plane.ranks}"
        numbers = [f"{plane.crossing:.2f}"]
        numbers += [f"{1e3 * plane.unbalanced_seconds:,.1f}", f"{1e3 * plane.seconds:,.1f}"]
        numbers += [f"{plane.tokens_per_second:,.0f}"]
        if plane.obstacle:
            numbers = ["not possible", "", "", ""]
        grid.add_row(Text(name, "bold" if best else ""), *numbers)
    return grid


def _fastest(advice: Advice) -> PlaneTime:
    return max(advice.planes, key=lambda plane: plane.tokens_per_second)


def _planes(advice: Advice) -> Iterator[str]:
    """Yield what the comparison of the data planes says, and why some are not possible."""
    best = _fastest(advice)
    others = [
        f"{best.tokens_per_second / plane.tokens_per_second:.2f}x {plane.plane}, EP{plane.ranks}"
        for plane in advice.planes
        if plane != best and not plane.obstacle
    ]
    over = f": {' and '.join(others)}" if others else ""
    yield f"{best.plane}, EP{best.ranks}, is the fastest{over}"
    for plane in advice.planes:
        if plane.obstacle:
            yield f"{plane.plane}, EP{plane.ranks}, is not possible: {plane.obstacle}"


def _between(between: BetweenDomains) -> str:
    """Return the imbalance between domains, and the forecast of a placement."""
    text = (
        f"replicas do not leave their domain: the busiest of {between.domains} has "
        f"{between.busiest:.2f} times the mean rows"
    )
    if between.placed is None or between.gain is None:
        return f"{text}; pass --trace to see what `ultraep trace place` would give"
    return (
        f"{text} in the second half of the trace, {between.placed:.2f} with experts placed by the "
        f"first half (`ultraep trace place`): {between.gain:.3f}x the throughput"
    )


def _details(advice: Advice, scenario: Scenario) -> Iterator[tuple[str, str]]:
    best, gain, memory = advice.option, advice.gain, advice.memory
    slots = f"{memory.slot / GB:.2f} GB per spare slot"
    needs = f"the fullest device needs {memory.none / GB:,.1f} GB without balancing"
    if best is not None:
        low, high = gain.microbatches
        spread = f"{low:.3f}x to {high:.3f}x in the middle 80 % of {scenario.microbatches} "
        seeds = ", ".join(f"{draw:.3f}x" for draw in gain.draws[1:])
        yield (
            "Gain",
            f"{gain.overall:.3f}x; {spread}{scenario.job.units}"
            + (f"; {seeds} with other seeds" if seeds else ""),
        )
        yield (
            "Throughput",
            f"{advice.none.throughput:,.1f} without balancing, {best.throughput:,.1f} with it, "
            f"{advice.ideal_throughput:,.1f} ideal; {advice.unit}",
        )
        per = f"tokens per rank and {scenario.job.unit}"
        yield (
            "Break-even",
            f"{_tokens(advice.break_even)} {per}; {CLEAR_GAIN:g}x: {_tokens(advice.clear_gain)} "
            f"(here: {scenario.job.tokens:,})",
        )
        slots = f"{memory.slots / GB:.2f} GB for {counted(best.slots, 'spare slot')}"
        needs += f", {memory.balanced / GB:,.1f} GB with it"
    yield "Memory", f"{slots}; {needs}, of {memory.device / GB:g} GB"
    for number, text in enumerate(_planes(advice)):
        yield "" if number else "Data plane", text
    if advice.between is not None:
        yield "Domains", _between(advice.between)
    for number, reason in enumerate(advice.reasons):
        yield "" if number else "Why", reason
    yield "Lost to ideal", advice.remainder
    yield "Settings", _settings(advice, scenario)


def _tokens(even: BreakEven | None) -> str:
    if even is None or even.tokens is None:
        return f"more than {PROBE_TOKENS[-1]:,}"
    if even.always:
        return f"at most {PROBE_TOKENS[0]}"
    return f"about {int(float(f'{even.tokens:.2g}')):,}"


def _settings(advice: Advice, scenario: Scenario) -> str:
    """Return the arguments of a Balancer."""
    if advice.verdict == DOES_NOT_PAY:
        return "no spare slots; leave balancing off"
    size = scenario.topology.domain_size
    domain = f", domain={size}" if size < scenario.ranks else ""
    if scenario.data_plane != AUTO:
        domain += f', data_plane="{scenario.data_plane}"'
    if scenario.objective == "time":  # the default of a balancer
        return f"slots={advice.slots}{domain}"
    config = f'ultraep.BalanceConfig(objective="balance", tolerance={advice.tolerance:g})'
    return f"slots={advice.slots}{domain}, config={config}"
