"""Options that say what is simulated, and the Scenario that they make.

For the commands that ask the simulator. An option that only one kind of scenario has is None unless
it is given, so that the other kind can refuse it instead of ignoring it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ultraep.errors import ConfigError
from ultraep.sim.cluster import load_cluster
from ultraep.sim.model import load_model
from ultraep.sim.published import Noise
from ultraep.sim.run import Report
from ultraep.sim.scenario import Contender, Scenario
from ultraep.sim.serving import Serving, load_requests
from ultraep.sim.training import Training
from ultraep.sim.workload import Recorded, Skew, Workload, fit_skew, read_workload

CLUSTER, MODEL, RANKS, TOKENS, IMBALANCE = "gb200-nvl72", "qwen3-235b", 64, 8192, 2.0
MOST_PROCESSES = 8
LITTLE_WORK = (
    1000  # layers times microbatches up to which a second process costs more than it saves
)


# -- options -------------------------------------------------------------------------------------

ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE",
        help="Devices and links: a preset (`ultraep simulate --presets` lists them), or a table "
        "of a file of your own, FILE.toml or FILE.toml:NAME.",
    ),
]
ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME|FILE",
        help="Sizes of the model: a preset, or a table of a file of your own.",
    ),
]
Ep = Annotated[
    int, typer.Option("--ep", metavar="RANKS", help="Ranks of the expert-parallel group.")
]
Slots = Annotated[
    int, typer.Option(help="Spare slots of every rank; each holds one copy of an expert.")
]
Tolerance = Annotated[
    float,
    typer.Option(
        help="How far above the mean ultraep may leave the fullest rank: 0.01 is 1 %, "
        "with fewer copies."
    ),
]
Imbalance = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Fullest rank over mean rank without balancing, on average over layers and "
        "microbatches; loads like that are drawn.",
        show_default=f"{IMBALANCE:g}",
    ),
]
NoiseOption = Annotated[
    float | None,
    typer.Option(
        "--noise",
        metavar="X",
        help="How much the popularity of experts differs from one microbatch to the next "
        "(deviation of its logarithm); the rest of the imbalance lasts.",
        show_default="as calibrated: {0.training:g} in training, {0.serving:g} in prefill".format(
            Noise()
        ),
    ),
]
TopicLength = Annotated[
    int | None,
    typer.Option(
        metavar="MICROBATCHES",
        help="Other experts are popular after so many microbatches, at once.",
        show_default="never",
    ),
]
DriftLength = Annotated[
    int | None,
    typer.Option(
        metavar="MICROBATCHES",
        help="Other experts become popular within so many microbatches, gradually.",
        show_default="never",
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A trace, recorded routing (.npz with arrays *_ids) or loads (.npy, .npz, .csv, "
        ".json) instead of drawn loads; it repeats when it ends.",
    ),
]
Tokens = Annotated[
    int,
    typer.Option(help="Tokens of every rank in a microbatch; with --prefill those of a chunk."),
]
Sequence = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS", help="Tokens of a text in training.", show_default="as --tokens"
    ),
]
Stages = Annotated[int | None, typer.Option(help="Pipeline stages in training.", show_default="1")]
Groups = Annotated[
    int | None,
    typer.Option(help="Data-parallel expert-parallel groups in training.", show_default="1"),
]
Microbatches = Annotated[
    int | None,
    typer.Option(help="Microbatches of a training step and group.", show_default="8"),
]
Steps = Annotated[int | None, typer.Option(help="Training steps to simulate.", show_default="8")]
NoRecompute = Annotated[
    bool,
    typer.Option(
        "--no-recompute",
        help="Training keeps all activations instead of running forward again before backward.",
    ),
]
Prefill = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Serve prefill requests instead of training: of the set stem, mixed, or of a table "
        "of a file.",
    ),
]
Domain = Annotated[
    int | None,
    typer.Option(
        metavar="RANKS",
        help="Ranks joined by the fast link; copies stay in the domain of their home.",
        show_default="as the cluster has it",
    ),
]
Interval = Annotated[
    int,
    typer.Option(
        metavar="MICROBATCHES",
        help="Microbatches for which policies that place by the past keep their places.",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn.")]
Processes = Annotated[
    int | None,
    typer.Option(
        help="Processes to share the work; the result is the same.",
        show_default=f"the cores, at most {MOST_PROCESSES}",
    ),
]


# -- the scenario --------------------------------------------------------------------------------


def make_scenario(
    *,
    cluster: str = CLUSTER,
    model: str = MODEL,
    ep: int = RANKS,
    slots: int = 1,
    tolerance: float = 0.01,
    imbalance: float | None = None,
    noise: float | None = None,
    topic_length: int | None = None,
    drift_length: int | None = None,
    trace: Path | None = None,
    tokens: int = TOKENS,
    sequence: int | None = None,
    stages: int | None = None,
    groups: int | None = None,
    microbatches: int | None = None,
    steps: int | None = None,
    no_recompute: bool = False,
    prefill: str | None = None,
    domain: int | None = None,
    interval: int = 100,
    seed: int = 0,
) -> Scenario:
    """What the options say; what cannot work is refused before loads are fitted."""
    drawing = {
        "imbalance": imbalance,
        "noise": noise,
        "topic_length": topic_length,
        "drift_length": drift_length,
    }
    training = {
        "sequence": sequence,
        "stages": stages,
        "groups": groups,
        "microbatches": microbatches,
        "steps": steps,
        "no_recompute": no_recompute or None,
    }
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed must lie between 0 and 2**63 - 1, got {seed}")
    if prefill is None:
        schedule: Training | Serving = _training(tokens, training)
    else:
        _refuse(training, "--prefill serves requests", "training")
        schedule = Serving(requests=load_requests(prefill), chunk=tokens, seed=seed)
    found = load_model(model)
    scenario = Scenario(
        cluster=load_cluster(cluster),
        model=found,
        workload=Skew(experts=found.experts, top_k=found.top_k, spread=0, noise=0),
        schedule=schedule,
        ranks=ep,
        slots=slots,
        tolerance=tolerance,
        interval=interval,
        domain=domain,
    )
    if trace is None:
        return replace(scenario, workload=_drawn(scenario, drawing, seed))
    _refuse(drawing, "--trace brings its own loads", "drawn loads")
    workload = read_workload(trace, experts=found.experts, top_k=found.top_k)
    return replace(scenario, workload=workload)


def _training(tokens: int, options: dict[str, Any]) -> Training:
    given = {name: value for name, value in options.items() if value is not None}
    recompute = not given.pop("no_recompute", False)
    return Training(tokens=tokens, recompute=recompute, **{"sequence": tokens, **given})


def _drawn(scenario: Scenario, options: dict[str, Any], seed: int) -> Workload:
    """Loads with the imbalance that was asked for."""
    given = {name: value for name, value in options.items() if value is not None}
    usual = Noise()
    training = isinstance(scenario.schedule, Training)
    noise = given.pop("noise", usual.training if training else usual.serving)
    return fit_skew(
        given.pop("imbalance", IMBALANCE),
        scenario.topology,
        scenario.model.top_k,
        range(scenario.model.dense_layers, scenario.model.layers),
        noise=noise,
        seed=seed,
        **given,
    )


def _refuse(options: dict[str, Any], why: str, kind: str) -> None:
    """Options of the other kind that were given all the same."""
    names = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if names:
        have = "has" if len(names) == 1 else "have"
        raise ConfigError(f"{why}: {' and '.join(names)} {have} no meaning there, only for {kind}")


def policies_of(names: str) -> list[str]:
    """The policies of a list with commas, each once; all of them can be simulated."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    if not found:
        raise ConfigError(f"--policy must name at least one policy, got {names!r}")
    return [Contender.of(name).label for name in dict.fromkeys(found)]


# -- in words ------------------------------------------------------------------------------------


def describe(scenario: Scenario, *, imbalance: float | None = None, slots: bool = True) -> str:
    """Three lines: where, how, and on which loads.

    imbalance: as asked for, of drawn loads.
    slots: whether to name the spare slots.
    """
    topology = scenario.topology
    domains = (
        f"fast-link domains of {topology.domain_size}"
        if topology.num_domains > 1
        else "one fast-link domain"
    )
    where = (
        f"{scenario.model.title} on {scenario.cluster.name}: "
        f"{_count(scenario.devices, 'device')}, EP{scenario.ranks} in {domains}"
    )
    if slots:
        where += f", {_count(scenario.slots, 'spare slot')}"
    return f"{where}\n{_schedule(scenario)}\n{_workload(scenario, imbalance)}"


def _schedule(scenario: Scenario) -> str:
    schedule = scenario.schedule
    if isinstance(schedule, Serving):
        requests = schedule.requests
        return (
            f"prefill of {requests.name}: prompts of {requests.mean_tokens:,.0f} tokens, chunks of "
            f"{schedule.chunk:,}, first token after {requests.limit_s:g} s on average"
        )
    parts = [
        f"training: {schedule.tokens:,} tokens per rank and microbatch",
        f"{_count(schedule.steps, 'step')} of {_count(schedule.microbatches, 'microbatch')}",
    ]
    if schedule.stages > 1:
        parts.append(f"{schedule.stages} pipeline stages")
    if schedule.groups > 1:
        parts.append(f"{schedule.groups} data-parallel groups")
    parts.append("recompute" if schedule.recompute else "no recompute")
    return ", ".join(parts)


def _workload(scenario: Scenario, imbalance: float | None) -> str:
    workload = scenario.workload
    if isinstance(workload, Recorded):
        windows, layers, _ = workload.loads.shape
        return f"recorded loads: {_count(windows, 'microbatch')} of {_count(layers, 'layer')}"
    asked = IMBALANCE if imbalance is None else imbalance
    return f"drawn loads of imbalance {asked:g} when nothing is balanced"


def _count(number: int, word: str) -> str:
    plural = "es" if word.endswith("ch") else "s"
    return f"{number:,} {word}{'' if number == 1 else plural}"


# -- running -------------------------------------------------------------------------------------


def processes_for(scenario: Scenario, asked: int | None) -> int:
    """As many as were asked for; else one for little work, or the cores."""
    if asked is not None:
        if asked < 1:
            raise ConfigError(f"--processes must be at least 1, got {asked}")
        return asked
    if scenario.model.moe_layers * scenario.microbatches <= LITTLE_WORK:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, MOST_PROCESSES)


@contextmanager
def progress_bar(what: str = "simulating layers") -> Iterator[Report]:
    """A bar on stderr that goes away again; nothing where stderr is no terminal."""
    stderr = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
