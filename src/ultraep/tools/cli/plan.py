"""`ultraep plan FILE`: plan the loads of a file and show what it brings.

Shapes: S microbatches, M of them of each layer, H layers, R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Annotated, Any

from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from ultraep.arrays import IntArray
from ultraep.backends import select
from ultraep.config import BalanceConfig, Rates
from ultraep.errors import ConfigError, LoadError
from ultraep.loads import as_loads
from ultraep.plan import PER_MS, Plan
from ultraep.plan import plan as make_plan
from ultraep.policies import get_policy
from ultraep.tools.cli import render
from ultraep.tools.cli.lists import names_in
from ultraep.tools.cli.options import Slots
from ultraep.tools.cli.progress import track_planning
from ultraep.tools.cli.render import Outcome
from ultraep.tools.cli.terminal import count, describe_topology, make_console, print_records
from ultraep.tools.sim.workload import WINDOW, read_microbatches
from ultraep.topology import Topology
from ultraep.workload.files import holds_routing

EXAMPLE = (
    "Example: ultraep plan loads.npy --slots 2 --policy quota,ultraep\n\n"
    "Example: ultraep plan run.npz --domain 8 --policy eplb,ultraep --history 4 --json\n\n"
    "Example: ultraep plan routing.npz --ranks 8 --experts 32"
)
SAMPLES = 9  # timed calls per policy, at least, unless they take longer than PATIENCE seconds
PATIENCE = 0.2


# -- options -------------------------------------------------------------------------------------

File = Annotated[
    Path,
    Argument(
        metavar="FILE",
        help="Loads (.npy, .npz, .csv, .json): integers \\[source rank, expert], or a sequence of "
        "such matrices, one per microbatch. Or a trace, or recorded routing: an .npz with expert "
        "ids \\[token, layer, choice] in arrays *_ids.",
    ),
]
Ranks = Annotated[
    int | None,
    Option(
        help="Ranks of the expert-parallel group; they share the tokens of recorded routing.",
        show_default="rows of the file",
    ),
]
Experts = Annotated[
    int | None,
    Option(
        help="Experts per layer of recorded routing.",
        show_default="the next power of two beyond its ids",
    ),
]
Window = Annotated[
    int | None,
    Option(
        metavar="TOKENS",
        help="Tokens per microbatch of recorded routing.",
        show_default=f"{WINDOW}",
    ),
]
Domain = Annotated[
    int | None,
    Option(
        help="Ranks joined by the fast link; copies stay in the domain of their home.",
        show_default="all ranks",
    ),
]
Policies = Annotated[
    str, Option(metavar="NAME,...", help="Policies to compare; `ultraep env` lists them.")
]
Tolerance = Annotated[
    float, Option(help="How far above the mean the fullest rank may stay: 0.01 is 1 %.")
]
MinTokens = Annotated[int, Option(help="Fewest tokens that a copy serves.")]
MaxReplicas = Annotated[
    int | None, Option(help="Most copies in one domain.", show_default="what the slots hold")
]
NoLocality = Annotated[
    bool, Option("--no-locality", help="Do not prefer a copy on the source rank of a token.")
]
CostRates = Annotated[
    str | None,
    Option(
        metavar="row=N,copy=N,...",
        help="Cost of tokens and copies in picoseconds, as in a balancer's log; ultraep then makes "
        "the copies that pay.",
        show_default="unknown",
    ),
]
Backend = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="cpu (compiled) or reference (slow); both give the same plan.",
        show_default="the fastest here",
    ),
]
History = Annotated[
    int,
    Option(help="Past microbatches for eplb, lplb and flashlb; the first microbatch sees itself."),
]
Show = Annotated[
    int | None, Option(help="Microbatch to draw, from 0.", show_default="the most imbalanced")
]
AsJson = Annotated[
    bool, Option("--json", help="Print only a JSON list, one object per microbatch and policy.")
]


@dataclass(frozen=True, eq=False)
class Series:
    """Microbatches layer by layer: all of the first layer, then all of the next."""

    loads: IntArray  # [S, R, E]
    layers: int = 1

    def __len__(self) -> int:
        return len(self.loads)

    def place(self, index: int) -> tuple[int, int]:
        """Return the layer, and the microbatch of that layer."""
        return divmod(index, len(self.loads) // self.layers)

    def past(self, index: int, number: int) -> IntArray:
        """Return the last microbatches of the same layer; the first one sees itself."""
        _, microbatch = self.place(index)
        begin = index - min(microbatch, number)
        return self.loads[begin : max(index, begin + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJob:
    """What is planned: every microbatch under every config."""

    series: Series
    topology: Topology
    configs: list[BalanceConfig]
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
    configs = [
        BalanceConfig(
            policy=name,
            tolerance=tolerance,
            min_tokens_per_replica=min_tokens,
            max_replicas=max_replicas,
            locality=not no_locality,
            rates=None if rates is None else Rates.from_text(rates),
        )
        for name in (get_policy(name).name for name in names_in(policy, "--policy"))
    ]
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
        print_records(_record(outcome, series) for outcome in outcomes)
    else:
        console = make_console()
        console.print(_heading(str(file), job))
        report(outcomes, console, series, show)


def read_series(
    file: Path, *, ranks: int | None = None, experts: int | None = None, window: int | None = None
) -> Series:
    """Read loads, a trace or recorded routing; `experts` and `window` are for routing alone."""
    if holds_routing(file):
        if ranks is None:
            raise ConfigError(
                f"{file}: recorded routing, expert ids of tokens: say how many ranks share the "
                "tokens, as in --ranks 8"
            )
        if ranks < 1:
            raise ConfigError(f"--ranks must be at least 1, got {ranks}")
    else:
        for option, value in (("--experts", experts), ("--window", window)):
            if value is not None:
                raise ConfigError(f"{option} is for recorded routing, and {file} holds none")
    loads_MHRE = read_microbatches(
        file,
        ranks=ranks or 1,
        experts=experts,
        window=WINDOW if window is None else window,
        any_homes=False,
    )
    layers = loads_MHRE.shape[1]
    return Series(loads_MHRE.swapaxes(0, 1).reshape(-1, *loads_MHRE.shape[2:]), layers)


def _topology(loads: IntArray, ranks: int | None, slots: int, domain: int | None) -> Topology:
    sources, experts = loads.shape[1:]
    if ranks is not None and ranks != sources:
        raise ConfigError(f"--ranks is {ranks}, but the file has loads of {sources} source ranks")
    if experts % sources:
        raise ConfigError(f"{experts} experts do not divide evenly over {sources} ranks")
    return Topology(ranks=sources, experts=experts, slots=slots, domain=domain)


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
    for config in job.configs:
        _ = _plan(job, 0, config).lower_bound  # compiled before time is taken
    steps = track_planning(range(len(job.series)), len(job.series) * len(job.configs))
    return [_outcome(job, step, config) for step in steps for config in job.configs]


def _outcome(job: PlanJob, step: int, config: BalanceConfig) -> Outcome:
    times: list[float] = []
    while not times or (len(times) * len(job.series) < SAMPLES and sum(times) < PATIENCE):
        start = perf_counter()
        plan = _plan(job, step, config)
        times.append(perf_counter() - start)
    without_past = job.series.place(step)[1] == 0 and get_policy(config.policy).needs_history
    return Outcome(config.policy, step, plan, 1e6 * median(times), without_past)


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
        console.print(Text(note, render.FAINT))
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
    tokens = count(round(loads.sum() / len(loads)), "token")
    parts = [count(layers, "layer")] if layers > 1 else []
    parts.append(tokens if len(loads) == 1 else f"{count(len(loads), 'microbatch')} of {tokens}")
    parts += describe_topology(job.topology)
    if select(job.backend).__name__ == "ultraep.backends.reference":
        parts.append("reference backend")
    return Text(f"{name}: {', '.join(parts)}\n")


def _footnotes(outcomes: list[Outcome]) -> Iterator[str]:
    groups = render.by_label(outcomes)
    steps = len({outcome.microbatch for outcome in outcomes})
    beyond = {label: sum(not o.plan.within_limits for o in own) for label, own in groups.items()}
    named = [f"{label} ({number} of {steps})" for label, number in beyond.items() if number]
    if named:
        yield (
            "* plans beyond the spare slots or domains, to compare with and not to run; "
            f"an expert that moved counts as a copy: {', '.join(named)}"
        )
    for label, group in groups.items():
        if group[0].plan.rates is not None:
            yield _times(label, [outcome.plan for outcome in group])
    blind = {label: sum(o.without_past for o in group) for label, group in groups.items()}
    if any(blind.values()):
        yield (
            f"{' and '.join(label for label in blind if blind[label])} on "
            f"{max(blind.values())} of {count(steps, 'microbatch')} "
            "had no past and saw the load itself"
        )


def _times(label: str, plans: list[Plan]) -> str:
    """Return what the plans of a policy take by the rates."""
    planned, without = (
        fmean(getattr(plan, name) for plan in plans) / PER_MS
        for name in ("time", "time_without_replicas")
    )
    alone = sum(plan.left_alone for plan in plans)
    left = f"; {alone} of {len(plans)} left alone, no copies would pay" if alone else ""
    return f"{label} by the rates: {planned:.4g} ms, without copies {without:.4g} ms{left}"


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
        "time_without_copies_ps": plan.time_without_replicas,
        "plan_us": round(outcome.plan_us, 3),
        "digest": plan.digest(),
        "rank_loads": plan.rank_loads.tolist(),
        "replicas": [
            [*replica, quota]
            for replica, quota in zip(plan.replicas.tolist(), plan.quotas.tolist(), strict=True)
        ],
    }
