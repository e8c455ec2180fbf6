"""`ultraep plan FILE`: plan the loads in a file, and show imbalance, replicas and planning time.

Shapes: M microbatches, R ranks, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text

from ultraep.arrays import IntArray
from ultraep.backends import select
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError, LoadError
from ultraep.loads import as_loads
from ultraep.plan import Plan
from ultraep.plan import plan as make_plan
from ultraep.policies import get_policy
from ultraep.topology import Topology
from ultraep.trace.read import holds_trace
from ultraep.workload.files import read_loads
from ultraep_tools.cli import options as cli
from ultraep_tools.cli.options import argument, option
from ultraep_tools.cli.terminal import (
    Terminal,
    describe_topology,
    make_grid,
    progress,
)
from ultraep_tools.report.words import counted

EXAMPLE = (
    "Example: ultraep plan loads.npy --slots 2 --policy quota,ultraep\n\n"
    "Example: ultraep plan loads.npz --domain 8 --policy eplb,ultraep --history 4 --json"
)
SAMPLES = 5  # timed calls per policy
PLAN_NUMBERS = (  # in JSON
    *("initial_imbalance", "imbalance", "lower_bound", "num_replicas"),
    *("max_fanout", "max_ingress", "max_egress", "remote_tokens"),
)
HEADERS = (
    *("policy", "imbalance\nbefore", "imbalance\nafter", "lower\nbound", "\nreplicas"),
    *("max\nfan-out", "max\ningress", "remote\nrows", "plan\nus"),
)


class Outcome(NamedTuple):
    """The plan of one microbatch."""

    microbatch: int
    plan: Plan
    plan_us: float


class PlanOptions(cli.Options):
    file: Path = argument(
        "Loads (.npy, .npz, .csv): integers \\[source rank, expert], or a list of such "
        "matrices, one per microbatch of a layer.",
        "FILE",
    )
    slots: int = cli.slots_option()
    domain: int | None = option(
        "Ranks joined by the fast link; replicas stay in their domain.", "all ranks"
    )
    policy: str = cli.policy_option("ultraep")
    tolerance: float = option(
        "How far the busiest rank may exceed the mean load: 0.01 is 1 %.", default=0.0
    )
    backend: str | None = option(
        "cpu (compiled) or reference (slow); their plans are equal.", "the fastest"
    )
    history: int = option(
        "Past microbatches that eplb and lplb plan from; the first one uses its own loads.",
        default=1,
    )
    as_json: bool = cli.json_option()


@cli.with_options
def command(options: PlanOptions) -> None:
    """Plan the loads in a file: imbalance before and after, replicas, planning time.

    Imbalance is the load of the busiest rank over the mean. No plan can go below the bound.

    Only the planner runs, no model. The planning time is the median of several calls. Plan a trace
    with `ultraep trace replay`.
    """
    configs = [
        BalanceConfig(policy=get_policy(name).name, tolerance=options.tolerance)
        for name in cli.split_names(options.policy, "--policy")
    ]
    if holds_trace(options.file):
        raise ConfigError(f"{options.file}: not loads; plan a trace with `ultraep trace replay`")
    if options.history < 1:
        raise ConfigError(f"--history must be at least 1, got {options.history}")
    loads_MRE = read_loads(options.file)
    topology = _topology(options, loads_MRE)
    outcomes = _plan_all(options, configs, loads_MRE, topology)
    if options.as_json:
        print("[\n" + ",\n".join(json.dumps(_record(outcome)) for outcome in outcomes) + "\n]")
        return
    terminal = Terminal()
    terminal.print(_heading(options, loads_MRE, topology))
    groups = [outcomes[number :: len(configs)] for number in range(len(configs))]
    terminal.print(make_grid(HEADERS, map(_cells, groups), padding=0))
    if len(loads_MRE) > 1:
        terminal.print_faint(f"mean of {len(loads_MRE)} microbatches, worst in parentheses")
    for group in groups:
        beyond = sum(not outcome.plan.within_limits for outcome in group)
        if beyond:
            terminal.print_faint(
                f"* {group[0].plan.config.policy}: {beyond} of {len(group)} plans exceed the spare "
                "slots or leave a domain, so they cannot run; a moved expert counts as a replica"
            )


def _topology(options: PlanOptions, loads_MRE: IntArray) -> Topology:
    """Return the topology; raise if it does not fit the loads."""
    _, ranks, experts = loads_MRE.shape
    if experts % ranks:
        raise ConfigError(
            f"{options.file}: {experts} experts do not divide evenly over {ranks} source ranks"
        )
    topology = Topology(ranks=ranks, experts=experts, slots=options.slots, domain=options.domain)
    for microbatch, loads_RE in enumerate(loads_MRE):
        try:
            as_loads(loads_RE, topology)
        except LoadError as error:
            raise LoadError(f"{options.file}, microbatch {microbatch}: {error}") from None
    return topology


def _plan_all(
    options: PlanOptions, configs: list[BalanceConfig], loads_MRE: IntArray, topology: Topology
) -> list[Outcome]:
    """Plan every microbatch under every config, in that order, and time the calls."""

    def plan(number: int, config: BalanceConfig) -> Plan:
        past = None
        if get_policy(config.policy).needs_history:  # the first microbatch uses its own loads
            past = loads_MRE[max(number - options.history, 0) : max(number, 1)]
        loads_RE = loads_MRE[number]
        return make_plan(loads_RE, topology, config, backend=options.backend, history=past)

    for config in configs:
        _ = plan(0, config).lower_bound  # compile before timing
    outcomes: list[Outcome] = []
    with progress("planning", lines=False) as report:
        for number, config in product(range(len(loads_MRE)), configs):
            times = []
            for _ in range(max(SAMPLES // len(loads_MRE), 1)):
                began = perf_counter()
                result = plan(number, config)
                times.append(1e6 * (perf_counter() - began))
            outcomes.append(Outcome(number, result, median(times)))
            report(number + 1, len(loads_MRE))
    return outcomes


# -- output --------------------------------------------------------------------------------------


def _heading(options: PlanOptions, loads_MRE: IntArray, topology: Topology) -> Text:
    count = len(loads_MRE)
    rows = counted(round(loads_MRE.sum() / count), "row")
    parts = [rows if count == 1 else f"{counted(count, 'microbatch')} of {rows}"]
    parts += describe_topology(topology)
    if select(options.backend).__name__ == "ultraep.backends.reference":
        parts.append("reference backend")
    return Text(f"{options.file}: {', '.join(parts)}\n")


def _cells(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the line of a policy, with means over all microbatches."""
    plans = [outcome.plan for outcome in outcomes]
    mark = "" if all(plan.within_limits for plan in plans) else "*"
    replicas = fmean(plan.num_replicas for plan in plans)
    plan_us = median(outcome.plan_us for outcome in outcomes)
    return [
        plans[0].config.policy + mark,
        _mean_and_worst([plan.initial_imbalance for plan in plans]),
        _mean_and_worst([plan.imbalance for plan in plans]),
        f"{fmean(plan.lower_bound for plan in plans):.3f}",
        f"{replicas:.0f}" if len(plans) == 1 else f"{replicas:.1f}",
        str(max(plan.max_fanout for plan in plans)),
        str(max(plan.max_ingress for plan in plans)),
        f"{fmean(plan.remote_tokens / max(plan.total, 1) for plan in plans):.1%}",
        f"{plan_us:.1f}" if plan_us < 100 else f"{plan_us:.0f}",
    ]


def _mean_and_worst(values: Sequence[float]) -> str:
    worst = f" ({max(values):.2f})" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{worst}"


def _record(outcome: Outcome) -> dict[str, Any]:
    plan = outcome.plan
    return {
        "microbatch": outcome.microbatch,
        "policy": plan.config.policy,
        **{name: getattr(plan, name) for name in PLAN_NUMBERS},
        "total_tokens": plan.total,
        "plan_us": round(outcome.plan_us, 3),
        "digest": plan.digest(),
        "rank_loads": plan.rank_loads.tolist(),
        "replicas": np.column_stack([plan.replicas, plan.quotas]).tolist(),
    }
