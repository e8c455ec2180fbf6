"""`ultraep advise`: does balancing pay on a cluster, and with which settings?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ultraep.tools.cli import options, render
from ultraep.tools.cli import scenario as scenarios
from ultraep.tools.cli.terminal import Grid, make_console
from ultraep.tools.sim.advise import TOLERANCES, Advice
from ultraep.tools.sim.advise import advise as ask
from ultraep.tools.sim.gain import PROBE_TOKENS, BreakEven
from ultraep.tools.sim.reasons import DOES_NOT_PAY, rounded
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
class AdviseOptions(options.ScenarioOptions):
    """What is simulated again and again, so with fewer steps."""

    steps: Annotated[
        int | None, typer.Option(help="Training steps to simulate.", show_default=f"{STEPS}")
    ] = None


@options.with_options(AdviseOptions)
def command(asked: AdviseOptions, as_json: AsJson = False) -> None:
    """Advise on a cluster before it is rented: does balancing pay, and with which settings?

    Tries spare slots (and tolerances, with --objective balance) on the same loads, and says what
    the best of them bring, from how many tokens per rank on, what it costs in memory, and why.
    """
    if asked.steps is None and asked.prefill is None:
        asked = replace(asked, steps=STEPS)
    made = scenarios.make_scenario(asked)
    if isinstance(made.job, Serving):
        made = replace(made, job=replace(made.job, iterations=ITERATIONS))
    many = scenarios.processes_for(made, asked.processes)
    with scenarios.progress_bar("trying settings") as report:
        advice = ask(made, processes=many, report=report)
    if as_json:
        print(json.dumps(asdict(advice), indent=2))
    else:
        heading = scenarios.describe(made, imbalance=asked.imbalance, slots=False)
        show(advice, made, heading, make_console())


# -- showing -------------------------------------------------------------------------------------


def show(advice: Advice, scenario: Scenario, heading: str, console: Console) -> None:
    """The verdict, all settings that were tried, then figure by figure."""
    name, sentence = verdict(advice)
    console.print(Text.assemble((name, "bold"), f": {sentence}\n"))
    console.print(Text(f"{heading}\n", render.FAINT))
    if advice.options:
        console.print(settings_table(advice))
        console.print(Text(_legend(advice), render.FAINT))
        console.print()
    console.print(figures(advice, scenario))
    console.print()
    console.print(Text(TRUST, render.FAINT))


def verdict(advice: Advice) -> tuple[str, str]:
    """The verdict, and one sentence for it."""
    name, option, gain = advice.verdict.capitalize(), advice.option, advice.gain
    if option is None:
        return name, "there is no place for a copy."
    digits = 3 if abs(gain.overall - 1) < 0.05 else 2
    low, overall, high = (f"{x:.{digits}f}x" for x in (gain.low, gain.overall, gain.high))
    spread = f"{overall} ({low} to {high}) the throughput of no balancing"
    how = "plans by time" if _by_time(advice) else f"tolerance {option.tolerance:g}"
    named = f"{_slots(option.slots)} and {how}"
    if advice.verdict == DOES_NOT_PAY:
        return name, (
            f"the best settings, {named}, would bring {spread}, "
            f"which is at {advice.none.share:.1%} of ideal."
        )
    return name, (
        f"{named} bring {spread}: {option.share:.1%} of ideal instead of {advice.none.share:.1%}."
    )


def settings_table(advice: Advice) -> Table:
    """Share of ideal by slots and tolerance; the settings that were picked are marked."""
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    grid.add_column("spare slots")
    columns = ["plans by time"]
    if not _by_time(advice):
        columns = [f"tolerance {tolerance:g}" for tolerance in TOLERANCES]
    for column in columns:
        grid.add_column(column, justify="right")
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


def _legend(advice: Advice) -> str:
    what = "Share of ideal, forced balance"
    if advice.option is None:
        return f"{what}."
    if advice.verdict == DOES_NOT_PAY:
        return f"{what}; * the best, though it does not pay."
    return f"{what}; * advised, the fewest slots near the best."


def figures(advice: Advice, scenario: Scenario) -> Table:
    """A line for every figure, and for every reason."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in _figures(advice, scenario):
        grid.add_row(name, text)
    return grid


def _figures(advice: Advice, scenario: Scenario) -> Iterator[tuple[str, str]]:
    if advice.option is not None:
        yield "Gain", _gain(advice, scenario)
        yield "Throughput", _throughput(advice)
        yield "Break-even", _break_even(advice)
    yield "Memory", _memory(advice)
    for number, reason in enumerate(advice.reasons):
        yield "" if number else "Why", reason
    yield "Left to ideal", advice.remainder
    yield "Settings", _copyable(advice)


def _gain(advice: Advice, scenario: Scenario) -> str:
    gain, (low, high) = advice.gain, advice.gain.microbatches
    what = "microbatches" if _once(advice) == "microbatch" else "iterations"
    text = (
        f"{gain.overall:.3f}x; {low:.3f}x to {high:.3f}x for the middle 80 % of "
        f"{scenario.microbatches} {what}"
    )
    if len(gain.draws) > 1:
        seeds = ", ".join(f"{draw:.3f}x" for draw in gain.draws)
        text += f"; {seeds} with {len(gain.draws)} seeds"
    return text


def _throughput(advice: Advice) -> str:
    assert advice.option
    return (
        f"{advice.none.throughput:,.1f} without balancing, {advice.option.throughput:,.1f} with "
        f"it, {advice.ideal_throughput:,.1f} ideal; {advice.unit}"
    )


def _break_even(advice: Advice) -> str:
    even, clear = advice.break_even, advice.clear_gain
    assert even
    assert clear
    per = f"tokens per rank and {_once(advice)}"
    if even.tokens is None:
        text = f"never, up to {PROBE_TOKENS[-1]:,} {per}"
    elif even.always:
        text = f"always, from {PROBE_TOKENS[0]} {per} on"
    else:
        text = f"about {rounded(even.tokens):,} {per}"
    return f"{text}{_clear_gain(even, clear)} (here: {advice.tokens:,})"


def _clear_gain(even: BreakEven, clear: BreakEven) -> str:
    if even.tokens is None:
        return ""
    if clear.tokens is None:
        return f"; {clear.gain:g}x never, up to {PROBE_TOKENS[-1]:,}"
    if clear.always:
        return f"; {clear.gain:g}x always, too"
    return f"; {clear.gain:g}x from about {rounded(clear.tokens):,} on"


def _once(advice: Advice) -> str:
    return "microbatch" if advice.job == "training" else "iteration"


def _memory(advice: Advice) -> str:
    memory = advice.memory
    need = f"{memory.none / GB:,.1f} GB"
    has = f"of {memory.device / GB:g} GB"
    if advice.option is None:
        return f"{memory.slot / GB:.2f} GB per spare slot; the fullest device needs {need} {has}"
    slots = f"{memory.slots / GB:.2f} GB for {_slots(advice.option.slots)}"
    balanced = f"{memory.balanced / GB:,.1f} GB"
    return f"{slots}; the fullest device needs {need} without balancing, {balanced} with it, {has}"


def _copyable(advice: Advice) -> str:
    """Arguments of a Balancer."""
    if advice.verdict == DOES_NOT_PAY:
        return "no spare slots; leave balancing off"
    domain = f", domain={advice.domain}" if advice.domain < advice.ranks else ""
    config = f'ultraep.BalanceConfig(objective="balance", tolerance={advice.tolerance:g})'
    if _by_time(advice):  # which is what a balancer does by itself
        return f"slots={advice.slots}{domain}"
    return f"slots={advice.slots}{domain}, config={config}"


def _by_time(advice: Advice) -> bool:
    return advice.objective == "time"


def _slots(number: int) -> str:
    return f"{number} spare slot{'' if number == 1 else 's'}"
