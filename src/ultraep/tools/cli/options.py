"""Options of the commands that ask the simulator, each described once.

`with_options` lets a command take them as one record.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from ultraep.tools.sim.published import Noise

CLUSTER, MODEL, RANKS, TOKENS, IMBALANCE = "gb200-nvl72", "qwen3-235b", 64, 8192, 2.0
MOST_PROCESSES = 8
USUAL = Noise()
Record = TypeVar("Record")

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
Interval = Annotated[
    int,
    typer.Option(
        metavar="MICROBATCHES",
        help="Microbatches for which policies that place by the past keep their places.",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Overwrite existing files that ultraep did not write.")
]


@dataclass(frozen=True, kw_only=True)
class ScenarioOptions:
    """What is simulated, and on how many processes.

    An option that only one kind of scenario has is None unless it is given, so that the other kind
    can refuse it instead of ignoring it.
    """

    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="Devices and links: a preset (`ultraep simulate --presets` lists them), or a "
            "table of a file of your own, FILE.toml or FILE.toml:NAME.",
        ),
    ] = CLUSTER
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="Sizes of the model: a preset, or a table of a file of your own.",
        ),
    ] = MODEL
    ep: Annotated[
        int, typer.Option(metavar="RANKS", help="Ranks of the expert-parallel group.")
    ] = RANKS
    imbalance: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Fullest rank over mean rank without balancing, on average over layers and "
            "microbatches; loads like that are drawn.",
            show_default=f"{IMBALANCE:g}",
        ),
    ] = None
    noise: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="How much the popularity of experts differs from one microbatch to the next "
            "(deviation of its logarithm); the rest of the imbalance lasts.",
            show_default=f"as calibrated: {USUAL.training:g} in training, "
            f"{USUAL.serving:g} in prefill",
        ),
    ] = None
    topic_length: Annotated[
        int | None,
        typer.Option(
            metavar="MICROBATCHES",
            help="Other experts are popular after so many microbatches, at once.",
            show_default="never",
        ),
    ] = None
    drift_length: Annotated[
        int | None,
        typer.Option(
            metavar="MICROBATCHES",
            help="Other experts become popular within so many microbatches, gradually.",
            show_default="never",
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A trace, recorded routing (.npz with arrays *_ids) or loads (.npy, .npz, .csv, "
            ".json) instead of drawn loads; it repeats when it ends.",
        ),
    ] = None
    tokens: Annotated[
        int,
        typer.Option(help="Tokens of every rank in a microbatch; with --prefill those of a chunk."),
    ] = TOKENS
    sequence: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS", help="Tokens of a text in training.", show_default="as --tokens"
        ),
    ] = None
    pipeline: Annotated[
        int | None,
        typer.Option(
            "--pipeline", "--stages", help="Parts of the pipeline in training.", show_default="1"
        ),
    ] = None
    groups: Annotated[
        int | None,
        typer.Option(help="Data-parallel expert-parallel groups in training.", show_default="1"),
    ] = None
    microbatches: Annotated[
        int | None,
        typer.Option(help="Microbatches of a training step and group.", show_default="8"),
    ] = None
    steps: Annotated[
        int | None, typer.Option(help="Training steps to simulate.", show_default="8")
    ] = None
    no_recompute: Annotated[
        bool,
        typer.Option(
            "--no-recompute",
            help="Training keeps all activations instead of running forward again before backward.",
        ),
    ] = False
    prefill: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Serve prefill requests instead of training: of the set stem, mixed, or of a "
            "table of a file.",
        ),
    ] = None
    domain: Annotated[
        int | None,
        typer.Option(
            metavar="RANKS",
            help="Ranks joined by the fast link; copies stay in the domain of their home.",
            show_default="as the cluster has it",
        ),
    ] = None
    objective: Annotated[
        str | None,
        typer.Option(
            metavar="time|balance",
            help="What ultraep plans for: the copies that pay, or balance whatever they cost.",
            show_default="time; with --prefill balance, as the integrations have it",
        ),
    ] = None
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="row=N,copy=N,...",
            help="What tokens and copies cost in plans by time, in picoseconds, as a balancer's "
            "log has it.",
            show_default="as cluster and model have it",
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0
    processes: Annotated[
        int | None,
        typer.Option(
            help="Processes to share the work; the result is the same.",
            show_default=f"the cores, at most {MOST_PROCESSES}",
        ),
    ] = None


def with_options(record: type[Record]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command whose first argument is such a record have an option for each of its fields."""
    kinds = get_type_hints(record, include_extras=True)
    known = {field.name: field.default for field in fields(record)}  # type: ignore[arg-type]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            asked = record(**{name: given.pop(name) for name in known})
            command(asked, **given)

        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        shared = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name])
            for name, default in known.items()
        ]
        own = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in own]
        run.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
        return run

    return decorate
