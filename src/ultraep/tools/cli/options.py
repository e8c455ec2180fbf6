"""Options that several commands share; `with_options` lets a command take them as one record."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from typer import Option

from ultraep.tools.sim.workload import calibrated_noise

CLUSTER, MODEL, RANKS, TOKENS, IMBALANCE = "gb200-nvl72", "qwen3-235b", 64, 8192, 2.0
NOISE, PREFILL_NOISE = (calibrated_noise(training=training) for training in (True, False))
MOST_PROCESSES = 8
Record = TypeVar("Record")

Slots = Annotated[int, Option(help="Spare slots per rank; each holds one copy of an expert.")]
Tolerance = Annotated[
    float, Option(help="How far above the mean ultraep may leave the fullest rank: 0.01 is 1 %.")
]
Interval = Annotated[
    int,
    Option(metavar="MICROBATCHES", help="How long policies that place by the past keep a place."),
]
Force = Annotated[
    bool, Option("--force", help="Overwrite existing files that ultraep did not write.")
]
TRAINING = "Training only: "


@dataclass(frozen=True, kw_only=True)
class ScenarioOptions:
    """What is simulated, and on how many processes.

    An option that only one kind of scenario has is None unless it is given, so that the other kind
    can refuse it instead of ignoring it.
    """

    cluster: Annotated[
        str,
        Option(
            metavar="NAME|FILE",
            help="Devices and links: a preset (`ultraep simulate --presets` lists them), "
            "FILE.toml or FILE.toml:NAME.",
        ),
    ] = CLUSTER
    model: Annotated[
        str, Option(metavar="NAME|FILE", help="Sizes of the model: a preset or a TOML file.")
    ] = MODEL
    ep: Annotated[int, Option(metavar="RANKS", help="Ranks of the expert-parallel group.")] = RANKS
    imbalance: Annotated[
        float | None,
        Option(
            metavar="X",
            help="Draw loads with this mean imbalance: fullest rank over mean rank.",
            show_default=f"{IMBALANCE:g}",
        ),
    ] = None
    noise: Annotated[
        float | None,
        Option(
            metavar="X",
            help="Standard deviation of log popularity between microbatches of drawn loads.",
            show_default=f"{NOISE:g}, {PREFILL_NOISE:g} with --prefill",
        ),
    ] = None
    topic_length: Annotated[
        int | None,
        Option(
            metavar="MICROBATCHES",
            help="Change the popular experts at once after this many microbatches.",
            show_default="never",
        ),
    ] = None
    drift_length: Annotated[
        int | None,
        Option(
            metavar="MICROBATCHES",
            help="Change the popular experts gradually within this many microbatches.",
            show_default="never",
        ),
    ] = None
    trace: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Use recorded loads: a trace, recorded routing (.npz with arrays *_ids) or loads "
            "(.npy, .npz, .csv, .json). They repeat at the end.",
        ),
    ] = None
    tokens: Annotated[
        int, Option(help="Tokens per rank and microbatch; with --prefill, tokens per chunk.")
    ] = TOKENS
    sequence_length: Annotated[
        int | None,
        Option(metavar="TOKENS", help=f"{TRAINING}tokens per sequence.", show_default="as --tokens"),
    ] = None
    pipeline: Annotated[
        int | None,
        Option("--pipeline", "--stages", help=f"{TRAINING}pipeline stages.", show_default="1"),
    ] = None
    groups: Annotated[
        int | None,
        Option(help=f"{TRAINING}data-parallel expert-parallel groups.", show_default="1"),
    ] = None
    microbatches: Annotated[
        int | None, Option(help=f"{TRAINING}microbatches per step and group.", show_default="8")
    ] = None
    steps: Annotated[int | None, Option(help=f"{TRAINING}steps to simulate.", show_default="8")] = (
        None
    )
    no_recompute: Annotated[
        bool, Option("--no-recompute", help=f"{TRAINING}keep all activations for backward.")
    ] = False
    prefill: Annotated[
        str | None,
        Option(
            metavar="NAME|FILE",
            help="Serve prefill requests instead of training: stem, mixed, or a TOML file.",
        ),
    ] = None
    domain: Annotated[
        int | None,
        Option(
            metavar="RANKS",
            help="Ranks joined by the fast link; copies stay in the domain of their home.",
            show_default="as the cluster has it",
        ),
    ] = None
    objective: Annotated[
        str | None,
        Option(
            metavar="time|balance",
            help="What ultraep plans for: the copies that pay, or balance whatever they cost.",
            show_default="time; balance with --prefill",
        ),
    ] = None
    rates: Annotated[
        str | None,
        Option(
            metavar="row=N,copy=N,...",
            help="Cost of tokens and copies in picoseconds, for plans by time.",
            show_default="of cluster and model",
        ),
    ] = None
    seed: Annotated[int, Option(help="Seed of everything that is drawn.")] = 0
    processes: Annotated[
        int | None,
        Option(
            help="Processes that share the work; they do not change the result.",
            show_default=f"the cores, at most {MOST_PROCESSES}",
        ),
    ] = None


def with_options(record: type[Record]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command whose first argument is such a record have an option for each of its fields."""
    kinds = get_type_hints(record, include_extras=True)
    known = {field.name: field.default for field in fields(record)}  # type: ignore[arg-type]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**values: Any) -> None:
            options = record(**{name: values.pop(name) for name in known})
            command(options, **values)

        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        shared = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name])
            for name, default in known.items()
        ]
        own = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in own]
        run.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
        return run

    return decorate
