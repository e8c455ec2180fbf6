"""`ultraep simulate`: what every policy would bring on a cluster, before one is rented."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ultraep.errors import ConfigError
from ultraep.files.writing import check_targets
from ultraep.tools.cli import options, render
from ultraep.tools.cli import scenario as scenarios
from ultraep.tools.cli.terminal import Grid, make_console
from ultraep.tools.sim.plots import Picture, check_plot, write_plot
from ultraep.tools.sim.presets import presets
from ultraep.tools.sim.run import Result
from ultraep.tools.sim.run import simulate as run_simulation
from ultraep.tools.sim.scenario import Contender, Scenario
from ultraep.tools.sim.timeline import make_timeline, median_microbatch
from ultraep.tools.sim.training import Training
from ultraep.trace.export import write_timeline

EXAMPLE = (
    "Example: ultraep simulate --cluster h200-nvl8 --model gpt-oss-20b --ep 8 --imbalance 1.6\n\n"
    "Example: ultraep simulate --prefill stem --imbalance 3 --policy none,eplb,ultraep --json\n\n"
    "Example: ultraep simulate --trace routing.npz --plot out.html --timeline out.json"
)
NONE, IDEAL, OURS = "none", "ideal", "ultraep"
WORTH_IT = 1.01  # gain over no balancing from which on balancing pays
GB = 1e9


# -- options -------------------------------------------------------------------------------------

Policies = Annotated[
    str,
    typer.Option(
        metavar="NAME,...",
        help="Policies to compare; `ultraep env` lists them. ideal is forced balance: every "
        "expert gets the same. NAME=OTHER prices one whose costs are not known as another: "
        "echo=ultraep.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print only a JSON list, one object per policy.")
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw the results: .png, .svg or .html (works offline)."),
]
Timeline = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json",
        help="Write one microbatch, rank by rank, for ui.perfetto.dev or chrome://tracing.",
    ),
]
TimelineLayers = Annotated[int, typer.Option(help="Layers in the timeline, from the first one on.")]
Presets = Annotated[
    bool, typer.Option("--presets", help="List clusters, models and sets of requests, and exit.")
]


@dataclass(frozen=True)
class Answer:
    """What was simulated: the policies asked for, and the two that the others are held against."""

    scenario: Scenario
    seed: int
    results: list[Result]
    none: Result
    ideal: Result

    def share(self, result: Result) -> float:
        """Throughput over that of forced balance."""
        return result.throughput / self.ideal.throughput

    def gain(self, result: Result) -> float:
        """Throughput over that without balancing."""
        return result.throughput / self.none.throughput


@options.with_options(options.ScenarioOptions)
def command(
    asked: options.ScenarioOptions,
    policy: Policies = "none,eplb,lplb,quota,ultraep,ideal",
    slots: options.Slots = 1,
    tolerance: options.Tolerance = 0.01,
    interval: options.Interval = 100,
    as_json: AsJson = False,
    plot: Plot = None,
    timeline: Timeline = None,
    timeline_layers: TimelineLayers = 4,
    list_presets: Presets = False,
    force: options.Force = False,
) -> None:
    """Simulate training or prefill on a cluster: would balancing pay there?

    The policies plan exactly as they would at run time; seconds come from data sheets, measured
    points and few calibrated constants.
    """
    if list_presets:
        print_presets(make_console())
        return
    names = scenarios.policies_of(policy)
    _check_targets(plot, timeline, timeline_layers, force=force)
    made = scenarios.make_scenario(asked, slots=slots, tolerance=tolerance, interval=interval)
    answer = run(made, names, seed=asked.seed, processes=asked.processes)
    heading = scenarios.describe(made, imbalance=asked.imbalance)
    console = make_console()
    if as_json:
        print_json(answer)
    else:
        report(answer, heading, console)
    for note in _write(answer, heading, plot, timeline, timeline_layers):
        if not as_json:
            console.print(note)


def run(scenario: Scenario, names: list[str], *, seed: int, processes: int | None) -> Answer:
    """Simulate the named policies, and the two that the others are held against."""
    every = list(dict.fromkeys([*names, NONE, IDEAL]))
    workers = scenarios.processes_for(scenario, processes)
    with scenarios.progress_bar() as bar:
        found = run_simulation(scenario, every, processes=workers, report=bar)
    by_name = {result.label: result for result in found}
    if not min(result.throughput for result in (by_name[NONE], by_name[IDEAL])):
        raise ConfigError(
            "no rate of requests, however low, keeps the limit of the mean time to the first token"
        )
    shown = [by_name[name] for name in names]
    return Answer(scenario, seed, shown, by_name[NONE], by_name[IDEAL])


# -- files ---------------------------------------------------------------------------------------


def _check_targets(plot: Path | None, timeline: Path | None, layers: int, *, force: bool) -> None:
    """Whether the files can be written, before anything is worked out for them."""
    if layers < 1:
        raise ConfigError(f"--timeline-layers must be at least 1, got {layers}")
    if plot:
        check_plot(plot)
    check_targets((plot, "picture"), (timeline, "timeline"), force=force)


def _write(
    answer: Answer, heading: str, plot: Path | None, timeline: Path | None, layers: int
) -> Iterator[str]:
    """Write the files that were asked for, and say so."""
    scenario = answer.scenario
    if plot:
        first = scenario.model.dense_layers
        write_plot(plot, Picture(heading, answer.results, answer.ideal.throughput, first))
        yield f"picture: {plot}"
    if timeline:
        chosen = median_microbatch(answer.none.by_microbatch)
        contenders = [Contender.of(result.label) for result in answer.results]
        made = make_timeline(scenario, contenders, microbatch=chosen, layers=layers)
        write_timeline(timeline, made)
        facts = made["otherData"]
        yield (
            f"timeline: {timeline}, for ui.perfetto.dev: microbatch {chosen}, layers "
            f"{facts['layers']}, ranks: {facts['ranks']}"
        )


# -- JSON ----------------------------------------------------------------------------------------


def print_json(answer: Answer) -> None:
    """A JSON list, one policy per line."""
    lines = (json.dumps(_record(answer, result)) for result in answer.results)
    print("[\n" + ",\n".join(lines) + "\n]")


def _record(answer: Answer, result: Result) -> dict[str, Any]:
    scenario, memory = answer.scenario, result.memory
    return {
        "policy": result.policy,
        "priced_as": result.priced_as,
        "throughput": result.throughput,
        "unit": result.unit,
        "share_of_ideal": answer.share(result),
        "gain_over_none": answer.gain(result),
        "tokens_per_second": result.tokens_per_second,
        "imbalance": result.imbalance,
        "worst_imbalance": result.worst_imbalance,
        "copies": result.copies,
        "slots": result.slots,
        "seconds": result.seconds,
        "stages": result.stages,
        "memory_gb": {
            "weights": memory.weights / GB,
            "slots": memory.slots / GB,
            "kept": memory.kept / GB,
            "rows": memory.rows / GB,
            "total": memory.total / GB,
        },
        "out_of_memory": result.out_of_memory,
        "imbalance_by_layer": result.imbalance_by_layer.tolist(),
        "cluster": scenario.cluster.name,
        "model": scenario.model.name,
        "job": "training" if isinstance(scenario.job, Training) else "prefill",
        "devices": scenario.devices,
        "ep": scenario.ranks,
        "domain": scenario.topology.domain_size,
        "objective": scenario.objective,
        "seed": answer.seed,
    }


# -- showing -------------------------------------------------------------------------------------


def report(answer: Answer, heading: str, console: Console) -> None:
    """What every policy brings, where its time goes, and what that means."""
    console.print(heading + "\n")
    console.print(_table(answer))
    for note in _notes(answer):
        console.print(Text(note, render.FAINT))
    training = isinstance(answer.scenario.job, Training)
    passes = ", forward and backward" if training else ""
    console.print(f"\nMilliseconds of a microbatch through all layers{passes}:\n")
    console.print(_stage_table(answer))
    named = "replicate, reroute, weights again, reduce" if training else "replicate, reroute"
    console.print(Text(f"{named}: the part that nothing else hides\n", render.FAINT))
    console.print(verdict(answer))
    console.print(Text("How far to trust these figures: docs/simulator.md", render.FAINT))


def _grid(*headers: str, first: str) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    grid.add_column(first, overflow="fold")
    for header in headers:
        grid.add_column(header, justify="right", overflow="fold")
    return grid


def _table(answer: Answer) -> Grid:
    short = any(result.out_of_memory for result in answer.results)
    grid = _grid(
        answer.results[0].unit.replace(" per ", "\nper "),
        "of\nideal",
        "over\nnone",
        "imbalance\nmean (worst)",
        "copies\nper layer",
        "fullest\ndevice GB",
        *(["out of\nmemory"] if short else []),
        first="policy",
    )
    for result in answer.results:
        mark = "!" if result.out_of_memory else " "
        grid.add_row(
            result.label,
            f"{result.throughput:,.1f}",
            f"{answer.share(result):.1%}",
            f"{answer.gain(result):.2f}x",
            f"{result.imbalance:.3f} ({result.worst_imbalance:.2f})",
            f"{result.copies:.1f}",
            f"{result.memory.total / GB:.1f}{mark if short else ''}",
            *([f"{result.out_of_memory:.0%}"] if short else []),
            style="bold" if result.policy == OURS else None,
        )
    return grid


def _notes(answer: Answer) -> Iterator[str]:
    yield "imbalance: fullest over mean rank; ideal: forced balance, all experts the same"
    if any(result.out_of_memory for result in answer.results):
        memory = answer.scenario.cluster.memory_gb
        yield f"! a device has {memory:g} GB; out of memory: share of the microbatches"
    if any(result.policy in ("eplb", "lplb", "flashlb") for result in answer.results):
        yield "eplb, lplb and flashlb also move experts; one that moved counts as a copy"


def _stage_table(answer: Answer) -> Grid:
    """A line for every stage that takes any time, a column for every policy."""
    results = answer.results
    grid = _grid(*(result.label for result in results), first="stage")
    for name in results[0].stages:
        seconds = [result.stages[name] for result in results]
        if any(seconds):
            grid.add_row(name, *(f"{1e3 * value:,.1f}" if value else "-" for value in seconds))
    grid.add_section()
    grid.add_row("in all", *(f"{1e3 * result.seconds:,.1f}" for result in results))
    return grid


def verdict(answer: Answer) -> str:
    """One sentence: does it pay?"""
    rivals = [result for result in answer.results if result.policy not in (NONE, IDEAL)]
    best = max(rivals, key=lambda result: result.throughput, default=None)
    ours = next((result for result in rivals if result.policy == OURS), best)
    most = answer.gain(answer.ideal)
    if ours is None or best is None:
        return f"Balancing can bring at most {most:.2f}x over no balancing here."
    gain, share = answer.gain(ours), answer.share(ours)
    if gain < WORTH_IT:
        said = (
            f"{ours.label} would not pay here: {gain:.2f}x over no balancing, and balancing cannot "
            f"bring more than {most:.2f}x"
        )
    else:
        said = (
            f"{ours.label} would bring {gain:.2f}x over no balancing, "
            f"{100 * share:.0f} % of forced balance"
        )
    if answer.gain(best) > max(gain, WORTH_IT) * WORTH_IT:
        said += f"; {best.label} more, {answer.gain(best):.2f}x"
    return f"{said}{_about_memory(answer, ours)}."


def _about_memory(answer: Answer, ours: Result) -> str:
    if ours.out_of_memory:
        return ", but its fullest device would run out of memory"
    if answer.none.out_of_memory:
        return ", and it fits into memory where no balancing does not"
    return ""


# -- presets -------------------------------------------------------------------------------------


def print_presets(console: Console) -> None:
    """Names, titles and sources of everything that has a name."""
    for kind, option in (
        ("clusters", "--cluster"),
        ("models", "--model"),
        ("requests", "--prefill"),
    ):
        console.print(Text(f"{kind}  ({option} NAME)", "bold"))
        for name, table in presets(kind).items():
            console.print(
                Padding(Text.assemble((name, render.CALM), f"  {table['title']}"), (0, 2))
            )
            if "source" in table:
                console.print(Padding(Text(table["source"], render.FAINT), (0, 6)))
        console.print()
    console.print("A TOML file of your own has tables of the same form: --cluster FILE.toml:NAME")
