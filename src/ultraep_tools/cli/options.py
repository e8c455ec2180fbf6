"""Options as records, options that several commands share, and lists of values in an option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import wraps
from inspect import Parameter, Signature, cleandoc
from typing import Annotated, Any, dataclass_transform, get_type_hints

from typer import Argument, Option

from ultraep.errors import ConfigError

MOST_IN_RANGE = 1 << 20


# -- records -------------------------------------------------------------------------------------


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Options:
    """Base class of the options of a command: a frozen dataclass of `option` fields."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


def option(
    text: str, shown: str = "", *, default: Any = None, metavar: str | None = None, flags: str = ""
) -> Any:
    """Return a field of `Options`.

    shown: the default in the help, if `default` is None.
    flags: the names of the option, if they differ from the name of the field.
    """
    info = Option(*flags.split(), help=text, metavar=metavar, show_default=shown or True)
    return field(default=default, metadata={"typer": info})


def switch(text: str, flag: str) -> Any:
    """Return a field of `Options` for an option without a value."""
    return option(text, default=False, flags=flag)


def argument(text: str, metavar: str, *, default: Any = MISSING) -> Any:
    """Return a field of `Options` for a positional argument."""
    info = Argument(help=text, metavar=metavar, show_default=False)
    return field(default=default, metadata={"typer": info})


def with_options(command: Callable[[Any], None]) -> Callable[..., None]:
    """Turn a command that takes `Options` into one with a parameter for every field."""
    record = get_type_hints(command)["options"]
    types = get_type_hints(record)

    @wraps(command)
    def run(**values: Any) -> None:
        command(record(**values))

    # typer wraps the first paragraph only, and keeps the line breaks of the others.
    paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
    run.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    run.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(
                item.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if item.default is MISSING else item.default,
                annotation=Annotated[types[item.name], item.metadata["typer"]],
            )
            for item in fields(record)
        ]
    )
    return run


def set_options(options: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the named options that were set, with their values."""
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if not (value is None or value is False)}


def refuse_options(options: Any, names: tuple[str, ...], reason: str) -> None:
    """Raise if one of the named options was set, instead of ignoring it."""
    flags = [f"--{name.replace('_', '-')}" for name in set_options(options, names)]
    if flags:
        raise ConfigError(f"{reason}; remove {' and '.join(flags)}")


# -- shared options ------------------------------------------------------------------------------


def json_option() -> Any:
    return switch("Print JSON only.", "--json")


def force_option() -> Any:
    return switch("Overwrite an existing file.", "--force")


def policy_option(default: str) -> Any:
    text = "Policies to compare; `ultraep env` lists them."
    return option(text, default=default, metavar="NAME,...")


def slots_option() -> Any:
    return option("Spare slots per rank; a slot holds one replica of an expert.", default=1)


# -- lists in an option --------------------------------------------------------------------------


def split_names(text: str, flag: str) -> tuple[str, ...]:
    """Split a list at its commas and drop duplicates.

    >>> split_names("none, eplb,none", "--policy")
    ('none', 'eplb')
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{flag} needs at least one name, got {text!r}")
    return tuple(dict.fromkeys(names))


def split_numbers(text: str, flag: str) -> tuple[int, ...]:
    """Split a list of numbers and ranges of numbers.

    >>> split_numbers("8, 0-2", "--layers")
    (8, 0, 1, 2)
    """
    numbers: list[int] = []
    for part in split_names(text, flag):
        first, _, last = part.partition("-")
        try:
            begin, end = int(first), int(last or first)
        except ValueError:
            raise ConfigError(f"{flag} must be numbers like 1,2 or 0-3, got {text!r}") from None
        if not 0 <= begin <= end < MOST_IN_RANGE:
            raise ConfigError(f"{flag} {part}: a range must ascend and start at 0 or above")
        numbers += range(begin, end + 1)
    return tuple(dict.fromkeys(numbers))
