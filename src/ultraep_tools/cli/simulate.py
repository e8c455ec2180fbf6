"""`ultraep simulate`: what every policy would bring on a cluster, before one is rented."""

from __future__ import annotations

from collections.abc import Iterator

from rich.padding import Padding
from rich.text import Text

from ultraep.policies import get_policy
from ultraep_tools.cli import options as cli
from ultraep_tools.cli import scenario as scenarios
from ultraep_tools.cli.options import option
from ultraep_tools.cli.terminal import FAINT, Grid, Terminal, make_grid, print_records, progress
from ultraep_tools.sim.presets import presets
from ultraep_tools.sim.run import Comparison
from ultraep_tools.sim.runtime import IDEAL, NONE, Contender

EXAMPLE = (
    "Example: ultraep simulate --cluster h200-nvl8 --model gpt-oss-20b --ep 8 --imbalance 1.6\n\n"
    "Example: ultraep simulate --prefill stem --imbalance 3 --policy none,eplb,ultraep --json\n\n"
    "Example: ultraep simulate --trace routing.npz --cluster h200-nvl8 --model gpt-oss-20b --ep 8"
)
OURS = "ultraep"
compare = Comparison.of
WORTH_IT = 1.01  # smallest gain over no balancing that pays
GB = 1e9


class SimulateOptions(scenarios.ScenarioOptions):
    """A scenario and the policies to simulate."""

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
    list_presets: bool = cli.switch(
        "List clusters, models and request sets, and exit.", "--presets"
    )


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
    contenders = [Contender.of(name) for name in cli.split_names(options.policy, "--policy")]
    balance = {name: getattr(options, name) for name in ("slots", "tolerance", "interval")}
    scenario = scenarios.make_scenario(options, **balance)
    workers = scenarios.processes_for(scenario, options.processes)
    with progress("simulating layers", lines=False) as report_layer:
        compared = compare(scenario, contenders, processes=workers, report=report_layer)
    if options.as_json:
        facts = scenario.facts | {"ep": scenario.ranks, "seed": options.seed}
        print_records(compared.record(result) | facts for result in compared.results)
    else:
        report(compared, scenarios.describe(scenario, imbalance=options.imbalance), terminal)


# -- output --------------------------------------------------------------------------------------


def report(compared: Comparison, heading: str, terminal: Terminal) -> None:
    """Print a verdict, throughput and memory of every policy, and its time by stage."""
    terminal.print(f"{verdict(compared)}\n", style="bold")
    terminal.print_faint(f"{heading}\n")
    terminal.print(_table(compared))
    for note in _notes(compared):
        terminal.print_faint(note)
    training = compared.scenario.job.trains
    passes = ", forward and backward" if training else ""
    terminal.print(f"\nMilliseconds per microbatch through all layers{passes}:\n")
    terminal.print(_stage_table(compared))
    stages = "replicate, reroute, weights again, reduce" if training else "replicate, reroute"
    terminal.print_faint(f"{stages}: only the time that does not overlap other work")
    terminal.print_faint("How accurate these numbers are: docs/simulator.md")


def _table(compared: Comparison) -> Grid:
    grid = make_grid(
        [
            *("policy", compared.results[0].unit.replace(" per ", "\nper "), "of\nideal"),
            *("over\nnone", "imbalance\nmean (worst)", "replicas\nper layer"),
            "fullest\ndevice GB",
        ]
    )
    for result in compared.results:
        mark = "!" if result.out_of_memory else ""
        grid.add_row(
            result.label,
            f"{result.throughput:,.1f}",
            f"{compared.share(result):.1%}",
            f"{compared.gain(result):.2f}x",
            f"{result.imbalance:.3f} ({result.worst_imbalance:.2f})",
            f"{result.copies:.1f}",
            f"{mark}{result.memory.total / GB:.1f}",
            style="bold" if result.policy == OURS else None,
        )
    return grid


def _notes(compared: Comparison) -> Iterator[str]:
    yield "imbalance: busiest over mean rank; ideal: forced balance, all experts equally loaded"
    if any(result.out_of_memory for result in compared.results):
        memory = compared.scenario.cluster.memory_gb
        yield f"! more than the {memory:g} GB of a device in some microbatches"
    if any(get_policy(result.policy).needs_history for result in compared.results):
        yield "eplb, lplb and flashlb also move experts; a moved expert counts as a replica"


def _stage_table(compared: Comparison) -> Grid:
    """Return a line for every stage that takes time, and a column for every policy."""
    results = compared.results
    grid = make_grid(["stage", *(result.label for result in results)])
    for name in results[0].stages:
        seconds = [result.stages[name] for result in results]
        if any(seconds):
            grid.add_row(name, *(f"{1e3 * value:,.1f}" if value else "-" for value in seconds))
    grid.add_section()
    grid.add_row("total", *(f"{1e3 * result.seconds:,.1f}" for result in results))
    return grid


def verdict(compared: Comparison) -> str:
    rivals = [result for result in compared.results if result.policy not in (NONE, IDEAL)]
    if not rivals:
        most = compared.gain(compared.ideal)
        return f"Balancing can reach at most {most:.2f}x the throughput of no balancing here."
    best = max(rivals, key=compared.gain)
    ours = next((result for result in rivals if result.policy == OURS), best)
    gain = compared.gain(ours)
    reaches = "reaches" if gain >= WORTH_IT else "does not pay here:"
    sentence = (
        f"{ours.label} {reaches} {gain:.2f}x the throughput of no balancing, "
        f"{compared.share(ours):.0%} of forced balance"
    )
    if compared.gain(best) > max(gain, WORTH_IT) * WORTH_IT:
        sentence += f"; {best.label} {compared.gain(best):.2f}x"
    if ours.out_of_memory:
        sentence += ", but its fullest device runs out of memory"
    elif compared.none.out_of_memory:
        sentence += ", and it fits into memory, unlike no balancing"
    return f"{sentence}."


# -- presets -------------------------------------------------------------------------------------


def print_presets(terminal: Terminal) -> None:
    for group, flag in {"clusters": "cluster", "models": "model", "requests": "prefill"}.items():
        terminal.print(Text(f"{group}  (--{flag} NAME)", "bold"))
        for name, table in presets(group).items():
            title = Text.assemble((name, "bold"), f"  {table['title']}")
            terminal.print(Padding(title, (0, 2)))
            if "source" in table:
                terminal.print(Padding(Text(table["source"], FAINT), (0, 6)))
        terminal.print()
    terminal.print("Your own TOML file has tables of the same form: --cluster FILE.toml:NAME")
