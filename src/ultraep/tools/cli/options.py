"""Options that several commands share, lists of values in an option, and records of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from typer import Option

from ultraep.errors import ConfigError
from ultraep.tools.sim.workload import calibrated_noise

CLUSTER, MODEL, RANKS, TOKENS, IMBALANCE = "gb200-nvl72", "qwen3-235b", 64, 8192, 2.0
NOISE, PREFILL_NOISE = (calibrated_noise(training=training) for training in (True, False))
MOST_PROCESSES = 8
MOST_IN_RANGE = 1 << 20
Record = TypeVar("Record")


def option(text: str, default: str = "", *, metavar: str | None = None, flag: str = "") -> Any:
    """Describe an option.

    default: what the help shows if the option's real default is None.
    flag: the name of the option, if it differs from the parameter.
    """
    names = [flag] if flag else []
    return Option(*names, help=text, metavar=metavar, show_default=default or True)


AsJson = Annotated[bool, option("Print JSON only.", flag="--json")]
Force = Annotated[
    bool, option("Overwrite existing files that ultraep did not write.", flag="--force")
]
Policies = Annotated[
    str, option("Policies to compare; `ultraep env` lists them.", metavar="NAME,...")
]
Slots = Annotated[int, option("Spare slots per rank; a slot holds one replica of an expert.")]
Tolerance = Annotated[
    float, option("How far the busiest rank may exceed the mean load: 0.01 is 1 %.")
]
TRAINING = "Training only: "


@dataclass(frozen=True, kw_only=True)
class ScenarioOptions:
    """The simulated cluster, model, job and loads.

    Options of training only or of synthetic loads only default to None, so that a scenario without
    training or with recorded loads can refuse them instead of ignoring them.
    """

    cluster: Annotated[
        str,
        option(
            "Cluster: a preset (`ultraep simulate --presets` lists them), FILE.toml or "
            "FILE.toml:NAME.",
            metavar="NAME|FILE",
        ),
    ] = CLUSTER
    model: Annotated[str, option("Model: a preset or a TOML file.", metavar="NAME|FILE")] = MODEL
    ep: Annotated[int, option("Ranks in the expert-parallel group.", metavar="RANKS")] = RANKS
    imbalance: Annotated[
        float | None,
        option("Mean imbalance of synthetic loads: busiest rank over mean rank.", f"{IMBALANCE:g}"),
    ] = None
    noise: Annotated[
        float | None,
        option(
            "Standard deviation of an expert's log popularity between microbatches.",
            f"{NOISE:g}, {PREFILL_NOISE:g} with --prefill",
        ),
    ] = None
    topic_length: Annotated[
        int | None,
        option("Microbatches after which the popular experts change at once.", "never"),
    ] = None
    drift_length: Annotated[
        int | None,
        option("Microbatches within which the popular experts change gradually.", "never"),
    ] = None
    trace: Annotated[
        Path | None,
        option(
            "Recorded loads instead of synthetic ones: a trace, routing (.npz with arrays *_ids) "
            "or loads (.npy, .npz, .csv, .json). They repeat from the start when they run out.",
            metavar="FILE",
        ),
    ] = None
    tokens: Annotated[
        int, option("Tokens per rank and microbatch; with --prefill, tokens per chunk.")
    ] = TOKENS
    sequence_length: Annotated[
        int | None, option(f"{TRAINING}tokens per sequence.", "as --tokens")
    ] = None
    pipeline: Annotated[
        int | None,
        Option("--pipeline", "--stages", help=f"{TRAINING}pipeline stages.", show_default="1"),
    ] = None
    groups: Annotated[
        int | None, option(f"{TRAINING}data-parallel replicas of the expert-parallel group.", "1")
    ] = None
    microbatches: Annotated[
        int | None, option(f"{TRAINING}microbatches per step and group.", "8")
    ] = None
    steps: Annotated[int | None, option(f"{TRAINING}steps to simulate.", "8")] = None
    no_recompute: Annotated[
        bool, option(f"{TRAINING}keep all activations for backward.", flag="--no-recompute")
    ] = False
    prefill: Annotated[
        str | None,
        option(
            "Serve prefill requests instead of training: stem, mixed, or a TOML file.",
            metavar="NAME|FILE",
        ),
    ] = None
    domain: Annotated[
        int | None,
        option(
            "Ranks joined by the fast link; replicas stay in the domain of their home.",
            "of the cluster",
        ),
    ] = None
    objective: Annotated[
        str | None,
        option(
            "Goal of ultraep's plans: shortest time, or balance whatever the replicas cost.",
            "time; balance with --prefill",
            metavar="time|balance",
        ),
    ] = None
    rates: Annotated[
        str | None,
        option(
            "Cost of a row and a replica in picoseconds, for --objective time.",
            "of cluster and model",
            metavar="row=N,copy=N,...",
        ),
    ] = None
    seed: Annotated[int, option("Random seed.")] = 0
    processes: Annotated[
        int | None,
        option(
            "Processes that share the work; the result does not depend on them.",
            f"one per core, at most {MOST_PROCESSES}",
        ),
    ] = None


def with_options(record: type[Record]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a command that takes a record of options into one with an option for every field."""
    types = get_type_hints(record, include_extras=True)
    defaults = {
        field.name: Parameter.empty if field.default is MISSING else field.default
        for field in fields(record)  # type: ignore[arg-type]
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**values: Any) -> None:
            options = record(**{name: values.pop(name) for name in defaults})
            command(options, **values)

        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        shared = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
            for name, default in defaults.items()
        ]
        own = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in own]
        run.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
        return run

    return decorate


def set_options(options: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the named options that were set, with their values."""
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if not (value is None or value is False)}


def refuse_options(options: Any, names: tuple[str, ...], reason: str) -> None:
    """Raise if one of the named options was set, instead of ignoring it."""
    flags = [f"--{name.replace('_', '-')}" for name in set_options(options, names)]
    if flags:
        raise ConfigError(f"{reason}; remove {' and '.join(flags)}")


# -- lists in an option --------------------------------------------------------------------------


def split_names(text: str, flag: str) -> list[str]:
    """Split a list at its commas and drop duplicates.

    >>> split_names("none, eplb,none", "--policy")
    ['none', 'eplb']
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{flag} needs at least one name, got {text!r}")
    return list(dict.fromkeys(names))


def split_numbers(text: str, flag: str) -> list[int]:
    """Split a list of integers."""
    try:
        return [int(number) for number in split_names(text, flag)]
    except ValueError:
        raise ConfigError(f"{flag} must be numbers like 1,2, got {text!r}") from None


def split_floats(text: str, flag: str) -> tuple[float, ...]:
    """Split a list of floats.

    >>> split_floats("0.5, 2", "--rate")
    (0.5, 2.0)
    """
    try:
        return tuple(float(number) for number in split_names(text, flag))
    except ValueError:
        raise ConfigError(f"{flag} must be numbers like 0.5,2, got {text!r}") from None


def split_ranges(text: str, flag: str) -> list[int]:
    """Return the sorted integers of a list that may contain ranges.

    >>> split_ranges("7,0-2", "--layers")
    [0, 1, 2, 7]
    """
    numbers: set[int] = set()
    for part in split_names(text, flag):
        first, _, last = part.partition("-")
        try:
            begin, end = int(first), int(last or first)
        except ValueError:
            raise ConfigError(f"{flag} must be numbers like 0-3,7, got {text!r}") from None
        if not 0 <= begin <= end < MOST_IN_RANGE:
            raise ConfigError(f"{flag} {part}: a range must ascend and start at 0 or above")
        numbers.update(range(begin, end + 1))
    return sorted(numbers)
