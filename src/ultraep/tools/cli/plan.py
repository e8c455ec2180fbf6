"""`ultraep plan FILE`: plan the loads of a file and show what it brings.

Shapes: S microbatches, R ranks, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.text import Text

from ultraep.arrays import IntArray
from ultraep.backends import select
from ultraep.config import BalanceConfig, Rates
from ultraep.errors import ConfigError, LoadError
from ultraep.loads import as_loads
from ultraep.plan import PER_MS, Plan
from ultraep.plan import plan as make_plan
from ultraep.policies import get_policy
from ultraep.tools.cli import render
from ultraep.tools.cli.options import Slots
from ultraep.tools.cli.render import Outcome
from ultraep.tools.cli.series import WINDOW, Series, read_series
from ultraep.tools.cli.terminal import make_console
from ultraep.topology import Topology

EXAMPLE = (
    "Example: ultraep plan loads.npy --slots 2 --policy quota,ultraep\n\n"
    "Example: ultraep plan run.npz --domain 8 --policy eplb,ultraep --history 4 --json\n\n"
    "Example: ultraep plan routing.npz --ranks 8 --experts 32"
)
SAMPLES = 9  # timed calls per policy, at least, unless they take longer than PATIENCE seconds
PATIENCE = 0.2
LONG_WORK = 100  # plans from which on a progress bar is worth having


# -- options -------------------------------------------------------------------------------------

File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="Loads as .npy, .npz, .csv or .json: integers \\[source rank, expert], "
        "or a sequence of such matrices, one per microbatch. Or a trace, or recorded routing: "
        "an .npz with expert ids \\[token, layer, choice] in arrays *_ids.",
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        help="Ranks of the expert-parallel group: loads are checked against it, tokens of "
        "recorded routing are shared out over them.",
        show_default="rows of the file",
    ),
]
Experts = Annotated[
    int | None,
    typer.Option(
        help="Experts of a layer of recorded routing.",
        show_default="the next power of two beyond its ids",
    ),
]
Window = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Tokens of a microbatch that is cut from recorded routing.",
        show_default=f"{WINDOW}",
    ),
]
Domain = Annotated[
    int | None,
    typer.Option(
        help="Ranks joined by the fast link; copies stay in the domain of their home.",
        show_default="all ranks",
    ),
]
Policies = Annotated[
    str,
    typer.Option(
        metavar="NAME,...", help="Policies to plan with, side by side; `ultraep env` lists them."
    ),
]
Tolerance = Annotated[
    float,
    typer.Option(
        help="How far above the mean the fullest rank may stay: 0.01 is 1 %, with fewer copies."
    ),
]
MinTokens = Annotated[
    int, typer.Option(help="A copy that would serve fewer tokens than this is not made.")
]
MaxReplicas = Annotated[
    int | None,
    typer.Option(help="Most copies in one domain.", show_default="what the slots hold"),
]
NoLocality = Annotated[
    bool,
    typer.Option("--no-locality", help="Do not prefer a copy on the rank that a token comes from."),
]
CostRates = Annotated[
    str | None,
    typer.Option(
        metavar="row=N,copy=N,...",
        help="What tokens and copies cost, in picoseconds, as a balancer's log has it: ultraep "
        "then makes the copies that pay.",
        show_default="nothing is known",
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="cpu (compiled) or reference (plain and slow); both give the same plan.",
        show_default="the fastest here",
    ),
]
History = Annotated[
    int,
    typer.Option(
        help="Past microbatches that eplb, lplb and flashlb place by; the first microbatch "
        "has none and sees itself."
    ),
]
Show = Annotated[
    int | None,
    typer.Option(help="Microbatch to draw, counted from 0.", show_default="the most imbalanced"),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print only a JSON list, one object per microbatch and policy."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJob:
    """What is to be planned: every microbatch under every config, each known by a label."""

    series: Series
    topology: Topology
    configs: dict[str, BalanceConfig]
    backend: str | None = None
    history: int = 1  # past microbatches that policies with a memory see


def command(
    file: File,
    ranks: Ranks = None,
    experts: Experts = None,
    window: Window = None,
    slots: Slots = 1,
    domain: Domain = None,
    policy: Policies = "ultraep",
    tolerance: Tolerance = 0.0,
    min_tokens: MinTokens = 1,
    max_replicas: MaxReplicas = None,
    no_locality: NoLocality = False,
    rates: CostRates = None,
    backend: Backend = None,
    history: History = 1,
    show: Show = None,
    as_json: AsJson = False,
) -> None:
    """Plan the loads of a file: imbalance before and after, copies, and what they cost.

    Imbalance is the fullest rank over the mean rank. No plan can go below the bound.

    Only the planner runs, no model. Its time is the median of calls after the first.
    """
    configs = {
        name: BalanceConfig(
            policy=name,
            tolerance=tolerance,
            min_tokens_per_replica=min_tokens,
            max_replicas=max_replicas,
            locality=not no_locality,
            rates=None if rates is None else Rates.from_text(rates),
        )
        for name in _names(policy)
    }
    series = read_series(file, ranks=ranks, experts=experts, window=window)
    topology = _topology(series.loads, ranks, slots, domain)
    _check_loads(file, series.loads, topology)
    job = PlanJob(
        series=series, topology=topology, configs=configs, backend=backend, history=history
    )
    if show is not None and not 0 <= show < len(series):
        raise ConfigError(f"--show must lie in 0..{len(series) - 1}, got {show}")
    outcomes = run(job)
    if as_json:
        print_json(outcomes, series)
    else:
        console = make_console()
        console.print(_heading(str(file), job))
        report(outcomes, console, series, show)


def _names(policies: str) -> list[str]:
    names = [name.strip() for name in policies.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--policy must name at least one policy, got {policies!r}")
    return [get_policy(name).name for name in dict.fromkeys(names)]


def _topology(loads: IntArray, ranks: int | None, slots: int, domain: int | None) -> Topology:
    rows, experts = loads.shape[1:]
    if ranks is not None and ranks != rows:
        raise ConfigError(f"--ranks is {ranks}, but the file has loads of {rows} source ranks")
    check_even(rows, experts)
    return Topology(ranks=rows, experts=experts, slots=slots, domain=domain)


def check_even(ranks: int, experts: int) -> None:
    """Here every rank is home to equally many experts; other homes are for Python only."""
    if ranks and experts % ranks:
        raise ConfigError(f"{experts} experts do not divide evenly over {ranks} ranks")


def _check_loads(file: Path, loads_SRE: IntArray, topology: Topology) -> None:
    for step, loads_RE in enumerate(loads_SRE):
        try:
            as_loads(loads_RE, topology)
        except LoadError as error:
            raise LoadError(f"{file}, microbatch {step}: {error}") from None


# -- planning ------------------------------------------------------------------------------------


def run(job: PlanJob) -> list[Outcome]:
    """Plan every microbatch under every config, in that order, and take the time."""
    if job.history < 1:
        raise ConfigError(f"--history must be at least 1, got {job.history}")
    for config in job.configs.values():
        _ = _plan(job, 0, config).lower_bound  # compiled before time is taken
    steps = range(len(job.series))
    stderr = make_console(stderr=True)
    quiet = len(steps) * len(job.configs) < LONG_WORK or not stderr.is_terminal
    shown = track(steps, "planning", console=stderr, transient=True, disable=quiet)
    return [
        _outcome(job, step, label, config)
        for step in shown
        for label, config in job.configs.items()
    ]


def _outcome(job: PlanJob, step: int, label: str, config: BalanceConfig) -> Outcome:
    times: list[float] = []
    while not times or (len(times) * len(job.series) < SAMPLES and sum(times) < PATIENCE):
        start = perf_counter()
        made = _plan(job, step, config)
        times.append(perf_counter() - start)
    without_past = job.series.place(step)[1] == 0 and get_policy(config.policy).needs_history
    return Outcome(label, step, made, 1e6 * median(times), without_past)


def _plan(job: PlanJob, step: int, config: BalanceConfig) -> Plan:
    past = None
    if get_policy(config.policy).needs_history:
        past = job.series.past(step, job.history)
    loads = job.series.loads[step]
    return make_plan(loads, job.topology, config, backend=job.backend, history=past)


# -- showing -------------------------------------------------------------------------------------


def report(
    outcomes: list[Outcome], console: Console, series: Series, show: int | None = None
) -> None:
    """The table with its footnotes, then the skylines of one microbatch."""
    console.print(render.table(outcomes))
    for note in _footnotes(outcomes):
        console.print(note)
    fullest = max(outcomes, key=lambda outcome: outcome.plan.initial_imbalance).microbatch
    drawn = [o for o in outcomes if o.microbatch == (fullest if show is None else show)]
    if len({outcome.microbatch for outcome in outcomes}) > 1:
        why = "the most imbalanced" if show is None else "as asked for"
        layer, _ = series.place(drawn[0].microbatch)
        where = f" (layer {layer})" if series.layers > 1 else ""
        console.print(f"\nMicrobatch {drawn[0].microbatch}{where}, {why}:")
    console.print()
    for page in render.skylines(drawn, console):
        console.print(page)
    console.print(render.legend(drawn[0].plan, console))


def _heading(name: str, job: PlanJob) -> Text:
    loads, layers = job.series.loads, job.series.layers
    steps, ranks, experts = loads.shape
    tokens = _count(round(loads.sum() / steps), "token")
    parts = [_count(layers, "layer")] if layers > 1 else []
    parts += [
        tokens if steps == 1 else f"{_count(steps, 'microbatch')} of {tokens}",
        _count(ranks, "rank"),
        _count(experts, "expert"),
        f"{_count(job.topology.slots, 'spare slot')} each",
    ]
    if select(job.backend).__name__ == "ultraep.backends.reference":
        parts.append("reference backend")
    if job.topology.num_domains > 1:
        parts.append(f"domains of {_count(job.topology.domain_size, 'rank')}")
    return Text(f"{name}: {', '.join(parts)}\n")


def _footnotes(outcomes: list[Outcome]) -> Iterator[Text]:
    groups = render.by_label(outcomes)
    beyond = {
        label: sum(not outcome.plan.within_limits for outcome in group)
        for label, group in groups.items()
    }
    steps = len({outcome.microbatch for outcome in outcomes})
    if any(beyond.values()):
        named = [f"{label} ({count} of {steps})" for label, count in beyond.items() if count]
        yield Text(
            "* plans beyond the spare slots or domains, to compare with and not to run; "
            f"an expert that moved counts as a copy: {', '.join(named)}",
            render.FAINT,
        )
    for label, group in groups.items():
        if group[0].plan.rates is not None:
            yield Text(_times(label, [outcome.plan for outcome in group]), render.FAINT)
    blind = {label: sum(o.without_past for o in group) for label, group in groups.items()}
    blind = {label: count for label, count in blind.items() if count}
    if blind:
        yield Text(
            f"{' and '.join(blind)} on {max(blind.values())} of {_count(steps, 'microbatch')} "
            "had no past and saw the load itself",
            render.FAINT,
        )


def _times(label: str, plans: list[Plan]) -> str:
    """What the plans of a policy should take, by the rates."""
    planned, without = (
        fmean(getattr(plan, name) for plan in plans) / PER_MS
        for name in ("time", "time_without_copies")
    )
    alone = sum(plan.left_alone for plan in plans)
    left = f"; {alone} of {len(plans)} left alone, no copies would pay" if alone else ""
    return f"{label} by the rates: {planned:.4g} ms, without copies {without:.4g} ms{left}"


def _count(number: int, word: str) -> str:
    plural = "es" if word.endswith("ch") else "s"
    return f"{number:,} {word}{'' if number == 1 else plural}"


def print_json(outcomes: list[Outcome], series: Series) -> None:
    """A JSON list, one plan per line."""
    lines = (json.dumps(_record(outcome, series)) for outcome in outcomes)
    print("[\n" + ",\n".join(lines) + "\n]")


def _record(outcome: Outcome, series: Series) -> dict[str, Any]:
    plan = outcome.plan
    return {
        "microbatch": outcome.microbatch,
        "layer": series.place(outcome.microbatch)[0],
        "policy": plan.config.policy,
        "initial_imbalance": plan.initial_imbalance,
        "imbalance": plan.imbalance,
        "lower_bound": plan.lower_bound,
        "num_replicas": plan.num_replicas,
        "max_fanout": plan.max_fanout,
        "max_ingress": plan.max_ingress,
        "max_egress": plan.max_egress,
        "remote_tokens": plan.remote_tokens,
        "total_tokens": plan.total,
        "time_ps": plan.time,
        "time_without_copies_ps": plan.time_without_copies,
        "plan_us": round(outcome.plan_us, 3),
        "digest": plan.digest(),
        "rank_loads": plan.rank_loads.tolist(),
        "replicas": [
            [*replica, quota]
            for replica, quota in zip(plan.replicas.tolist(), plan.quotas.tolist(), strict=True)
        ],
    }
