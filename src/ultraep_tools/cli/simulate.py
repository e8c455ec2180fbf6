"""`ultraep simulate`: what every policy would bring on a cluster, before one is rented."""

from __future__ import annotations

import html
import importlib
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.padding import Padding
from rich.text import Text

from ultraep.errors import BackendUnavailable, ConfigError
from ultraep.files.writing import whole_file
from ultraep.policies import get_policy
from ultraep.supported import install_extra
from ultraep_tools.cli import options as cli
from ultraep_tools.cli import render
from ultraep_tools.cli import scenario as scenarios
from ultraep_tools.cli.options import option
from ultraep_tools.cli.terminal import FAINT, Grid, Terminal, make_grid, print_records, progress
from ultraep_tools.export import write_timeline
from ultraep_tools.outputs import MARKS, check_targets
from ultraep_tools.sim.presets import presets
from ultraep_tools.sim.run import Result, make_timeline, median_microbatch
from ultraep_tools.sim.run import simulate as run_simulation
from ultraep_tools.sim.runtime import Contender
from ultraep_tools.sim.scenario import Scenario

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXAMPLE = (
    "Example: ultraep simulate --cluster h200-nvl8 --model gpt-oss-20b --ep 8 --imbalance 1.6\n\n"
    "Example: ultraep simulate --prefill stem --imbalance 3 --policy none,eplb,ultraep --json\n\n"
    "Example: ultraep simulate --trace routing.npz --plot out.html --timeline out.json"
)
NONE, IDEAL, OURS = "none", "ideal", "ultraep"
WORTH_IT = 1.01  # smallest gain over no balancing that pays
GB = 1e9
RESULT_NUMBERS = (  # in JSON, besides the scenario
    *("policy", "priced_as", "throughput", "unit", "tokens_per_second", "imbalance"),
    *("worst_imbalance", "copies", "slots", "seconds", "stages", "out_of_memory"),
)


@dataclass(frozen=True)
class Answer:
    """The results of the selected policies, of no balancing, and of forced balance."""

    scenario: Scenario
    seed: int
    results: list[Result]
    none: Result
    ideal: Result

    def share(self, result: Result) -> float:
        """Return the throughput relative to forced balance."""
        return result.throughput / self.ideal.throughput

    def gain(self, result: Result) -> float:
        """Return the throughput relative to no balancing."""
        return result.throughput / self.none.throughput


class SimulateOptions(scenarios.ScenarioOptions):
    """A scenario, the policies to simulate, and the files to write."""

    policy: str = option(
        "Policies to compare; `ultraep env` lists them. ideal is forced balance. NAME=OTHER uses "
        "the costs of OTHER for a policy of unknown cost: echo=ultraep.",
        default="none,eplb,lplb,quota,ultraep,ideal",
        metavar="NAME,...",
    )
    slots: int = cli.slots_option()
    tolerance: float = cli.tolerance_option(0.01)
    interval: int = option(
        "Microbatches between placements of policies that plan from past loads.", default=100
    )
    as_json: bool = cli.json_option()
    plot: Path | None = option("Draw the results: .png, .svg or .html.", metavar="FILE")
    timeline: Path | None = option(
        "Write a timeline of one microbatch, one track per rank, to open in ui.perfetto.dev or "
        "chrome://tracing.",
        metavar="FILE",
    )
    timeline_layers: int = option("Layers in the timeline, from the first.", default=4)
    list_presets: bool = cli.switch(
        "List clusters, models and request sets, and exit.", "--presets"
    )
    force: bool = cli.force_option()


@cli.with_options
def command(options: SimulateOptions) -> None:
    """Simulate training or prefill on a cluster: would balancing pay there?

    The policies make the same plans as at run time. Times come from data sheets, measurements and a
    few calibrated constants.
    """
    terminal = Terminal()
    if options.list_presets:
        print_presets(terminal)
        return
    names = [Contender.of(name).label for name in cli.split_names(options.policy, "--policy")]
    if options.timeline_layers < 1:
        raise ConfigError(f"--timeline-layers must be at least 1, got {options.timeline_layers}")
    if options.plot:
        check_plot(options.plot)
    targets = (options.plot, "picture"), (options.timeline, "timeline")
    check_targets(*targets, force=options.force)
    balance = {name: getattr(options, name) for name in ("slots", "tolerance", "interval")}
    scenario = scenarios.make_scenario(options, **balance)
    answer = run(scenario, names, seed=options.seed, processes=options.processes)
    heading = scenarios.describe(scenario, imbalance=options.imbalance)
    if options.as_json:
        print_records(_record(answer, result) for result in answer.results)
    else:
        report(answer, heading, terminal)
    for note in _write(answer, heading, options):
        if not options.as_json:
            terminal.print(note)


def run(scenario: Scenario, names: list[str], *, seed: int, processes: int | None) -> Answer:
    """Simulate the named policies, no balancing, and forced balance."""
    every = list(dict.fromkeys([*names, NONE, IDEAL]))
    workers = scenarios.processes_for(scenario, processes)
    with progress("simulating layers", lines=False) as report_layer:
        results = run_simulation(scenario, every, processes=workers, report=report_layer)
    by_name = {result.label: result for result in results}
    none, ideal = by_name[NONE], by_name[IDEAL]
    if not min(none.throughput, ideal.throughput):
        raise ConfigError(
            "no request rate keeps the mean time to first token below the limit of the requests; "
            "raise their limit_s or use more ranks"
        )
    return Answer(scenario, seed, [by_name[name] for name in names], none, ideal)


def _write(answer: Answer, heading: str, options: SimulateOptions) -> Iterator[str]:
    if options.plot:
        ideal, first = answer.ideal.throughput, answer.scenario.model.dense_layers
        write_plot(options.plot, heading, answer.results, ideal=ideal, first_layer=first)
        yield f"picture: {options.plot}"
    if options.timeline:
        microbatch = median_microbatch(answer.none.by_microbatch)
        contenders = [Contender.of(result.label) for result in answer.results]
        events = make_timeline(
            answer.scenario, contenders, microbatch=microbatch, layers=options.timeline_layers
        )
        write_timeline(options.timeline, events)
        facts = events["otherData"]
        yield (
            f"timeline: {options.timeline}, for ui.perfetto.dev: microbatch {microbatch}, layers "
            f"{facts['layers']}, ranks: {facts['ranks']}"
        )


def _record(answer: Answer, result: Result) -> dict[str, Any]:
    scenario, memory = answer.scenario, result.memory
    parts = asdict(memory) | {"total": memory.total}
    return {
        **{name: getattr(result, name) for name in RESULT_NUMBERS},
        "share_of_ideal": answer.share(result),
        "gain_over_none": answer.gain(result),
        "memory_gb": {name: size / GB for name, size in parts.items()},
        "imbalance_by_layer": result.imbalance_by_layer.tolist(),
        **scenario.facts,
        "ep": scenario.ranks,
        "seed": answer.seed,
    }


# -- output --------------------------------------------------------------------------------------


def report(answer: Answer, heading: str, terminal: Terminal) -> None:
    """Print throughput and memory of every policy, its time by stage, and a verdict."""
    terminal.print(heading + "\n")
    terminal.print(_table(answer))
    for note in _notes(answer):
        terminal.print_faint(note)
    training = answer.scenario.job.trains
    passes = ", forward and backward" if training else ""
    terminal.print(f"\nMilliseconds per microbatch through all layers{passes}:\n")
    terminal.print(_stage_table(answer))
    stages = "replicate, reroute, weights again, reduce" if training else "replicate, reroute"
    terminal.print_faint(f"{stages}: only the time that does not overlap other work\n")
    terminal.print(verdict(answer))
    terminal.print_faint("How accurate these numbers are: docs/simulator.md")


def _table(answer: Answer) -> Grid:
    short = any(result.out_of_memory for result in answer.results)
    grid = make_grid(
        [
            *("policy", answer.results[0].unit.replace(" per ", "\nper "), "of\nideal"),
            *("over\nnone", "imbalance\nmean (worst)", "replicas\nper layer"),
            *("fullest\ndevice GB", *(["out of\nmemory"] if short else [])),
        ]
    )
    for result in answer.results:
        mark = "!" if result.out_of_memory else ""
        grid.add_row(
            result.label,
            f"{result.throughput:,.1f}",
            f"{answer.share(result):.1%}",
            f"{answer.gain(result):.2f}x",
            f"{result.imbalance:.3f} ({result.worst_imbalance:.2f})",
            f"{result.copies:.1f}",
            f"{mark}{result.memory.total / GB:.1f}",
            *([f"{result.out_of_memory:.0%}"] if short else []),
            style="bold" if result.policy == OURS else None,
        )
    return grid


def _notes(answer: Answer) -> Iterator[str]:
    yield "imbalance: busiest over mean rank; ideal: forced balance, all experts equally loaded"
    if any(result.out_of_memory for result in answer.results):
        memory = answer.scenario.cluster.memory_gb
        yield f"! more than the {memory:g} GB of a device; out of memory: share of microbatches"
    if any(get_policy(result.policy).needs_history for result in answer.results):
        yield "eplb, lplb and flashlb also move experts; a moved expert counts as a replica"


def _stage_table(answer: Answer) -> Grid:
    """Return a line for every stage that takes time, and a column for every policy."""
    results = answer.results
    grid = make_grid(["stage", *(result.label for result in results)])
    for name in results[0].stages:
        seconds = [result.stages[name] for result in results]
        if any(seconds):
            grid.add_row(name, *(f"{1e3 * value:,.1f}" if value else "-" for value in seconds))
    grid.add_section()
    grid.add_row("total", *(f"{1e3 * result.seconds:,.1f}" for result in results))
    return grid


def verdict(answer: Answer) -> str:
    rivals = [result for result in answer.results if result.policy not in (NONE, IDEAL)]
    if not rivals:
        most = answer.gain(answer.ideal)
        return f"Balancing can reach at most {most:.2f}x the throughput of no balancing here."
    best = max(rivals, key=answer.gain)
    ours = next((result for result in rivals if result.policy == OURS), best)
    gain = answer.gain(ours)
    reaches = "reaches" if gain >= WORTH_IT else "does not pay here:"
    sentence = (
        f"{ours.label} {reaches} {gain:.2f}x the throughput of no balancing, "
        f"{answer.share(ours):.0%} of forced balance"
    )
    if answer.gain(best) > max(gain, WORTH_IT) * WORTH_IT:
        sentence += f"; {best.label} {answer.gain(best):.2f}x"
    if ours.out_of_memory:
        sentence += ", but its fullest device runs out of memory"
    elif answer.none.out_of_memory:
        sentence += ", and it fits into memory, unlike no balancing"
    return f"{sentence}."


# -- presets -------------------------------------------------------------------------------------


def print_presets(terminal: Terminal) -> None:
    for group, flag in {"clusters": "cluster", "models": "model", "requests": "prefill"}.items():
        terminal.print(Text(f"{group}  (--{flag} NAME)", "bold"))
        for name, table in presets(group).items():
            title = Text.assemble((name, render.CALM), f"  {table['title']}")
            terminal.print(Padding(title, (0, 2)))
            if "source" in table:
                terminal.print(Padding(Text(table["source"], FAINT), (0, 6)))
        terminal.print()
    terminal.print("Your own TOML file has tables of the same form: --cluster FILE.toml:NAME")


# -- plots ---------------------------------------------------------------------------------------

FORMATS = (".png", ".svg", ".html")
# Colour and stages of every part of a bar, from its bottom to its top.
PARTS = {
    "attention": ("#9aa5b1", "attention", "attention back"),
    "experts": ("#2f6db3", "experts", "experts back"),
    "dispatch, combine": ("#7fb2e5", "dispatch", "combine", "combine back", "dispatch back"),
    "recompute": ("#d7dde3", "recompute"),
    "loads, plan": ("#e8a33d", "loads", "plan"),
    "weights, gradients": ("#c8502d", "replicate", "reroute", "weights again", "reduce"),
}
POLICY_COLOURS = {"none": "#8b8f94", "eplb": "#c58b2a", "lplb": "#8a6bb8", "quota": "#3f8f6b"}
POLICY_COLOURS |= {"ultraep": "#2f6db3", "ideal": "#1c1f23"}
OTHER_COLOURS = ("#b3475f", "#5f9ea0", "#a0522d")
STYLE: dict[Any, Any] = {"font.size": 9, "axes.titlesize": 10, "svg.hashsalt": "ultraep"}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False}
METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": "ultraep"},
    "svg": {"Date": None, "Creator": "ultraep"},
}


def check_plot(path: str | Path) -> None:
    """Raise if the file format is unknown or matplotlib is missing."""
    ending = Path(path).suffix.lower()
    if ending not in FORMATS:
        raise ConfigError(
            f"{path}: a plot must end in {', '.join(FORMATS)}, got {ending or 'no ending'}"
        )
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise BackendUnavailable(
            f"plots need matplotlib ({error}): {install_extra('plot')}"
        ) from None


def write_plot(
    path: str | Path, title: str, results: Sequence[Result], *, ideal: float, first_layer: int = 0
) -> None:
    """Write a plot in the format of the file name. ideal: throughput of forced balance."""
    check_plot(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    ending = Path(path).suffix.lower()
    image_format, image = "png" if ending == ".png" else "svg", io.BytesIO()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13, 5.2), layout="constrained")
        throughput, imbalance, stages = figure.subplots(1, 3)
        figure.suptitle(title, fontsize=11)
        spare = itertools.cycle(OTHER_COLOURS)
        colours = [POLICY_COLOURS.get(result.label) or next(spare) for result in results]
        _draw_throughput(throughput, results, colours, ideal)
        _draw_imbalance(imbalance, results, colours, first_layer)
        _draw_stages(stages, results)
        for axes in (imbalance, stages):
            axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
        figure.savefig(image, format=image_format, dpi=150, metadata=METADATA[image_format])
    content = image.getvalue()
    if ending == ".html":
        head = f'<!doctype html><html><head>{MARKS["page"].decode()}<meta charset="utf-8">'
        head += f"<title>{html.escape(title)}</title></head><body>"
        content = head.encode() + content[content.index(b"<svg") :] + b"</body></html>"
    with whole_file(path) as file:
        file.write(content)


def _draw_throughput(
    axes: Axes, results: Sequence[Result], colours: list[str], ideal: float
) -> None:
    bars = axes.bar([r.label for r in results], [r.throughput for r in results], color=colours)
    axes.bar_label(bars, [f"{r.throughput / ideal:.0%}" for r in results], padding=2)
    axes.set_title("Throughput, and its share of forced balance")
    axes.set_ylabel(results[0].unit)
    axes.margins(y=0.1)


def _draw_imbalance(
    axes: Axes, results: Sequence[Result], colours: list[str], first_layer: int
) -> None:
    for result, colour in zip(results, colours, strict=True):
        layers = first_layer + np.arange(len(result.imbalance_by_layer))
        axes.plot(layers, result.imbalance_by_layer, color=colour, label=result.label)
    axes.set_title("Busiest rank over mean rank, by layer")
    axes.set_xlabel("layer")
    axes.set_ylabel("imbalance, mean over microbatches")


def _draw_stages(axes: Axes, results: Sequence[Result]) -> None:
    bottom = np.zeros(len(results))
    for part, (colour, *names) in PARTS.items():
        values = [1e3 * sum(r.stages.get(name, 0.0) for name in names) for r in results]
        if any(values):
            labels = [result.label for result in results]
            axes.bar(labels, values, bottom=bottom, color=colour, label=part)
            bottom += values
    axes.set_title("A microbatch through all layers")
    axes.set_ylabel("ms")
    axes.set_ylim(0, 1.05 * bottom.max())
