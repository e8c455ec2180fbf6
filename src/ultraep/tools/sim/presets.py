"""Presets and your own files: tables of TOML, turned into records.

A name picks a preset; `file.toml` the first table of a file, `file.toml:name` another one of it.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from ultraep.errors import ConfigError, FileError
from ultraep.files.reading import read_text, reading

Record = TypeVar("Record")
Table = dict[str, Any]

LARGEST = 10**15  # of any number in a table
MOST_TABLES = 1 << 15  # bytes of a TOML file; tomllib takes seconds for some of that length
NAMES_OF_ONE = {"clusters": "cluster", "models": "model", "requests": "set of requests"}


def load_table(kind: str, name: str) -> tuple[str, Table]:
    """Return name and table of a preset of a kind (clusters, models), or of a file."""
    path, _, wanted = name.partition(":") if ".toml" in name else ("", "", name)
    tables = _tables_of_file(Path(path)) if path else presets(kind)
    if path and not wanted:
        wanted = next(iter(tables))
    if wanted not in tables:
        near = difflib.get_close_matches(wanted, tables, n=1, cutoff=0.4)
        hint = f" did you mean {near[0]}?" if near else ""
        where = f"{path}: " if path else ""
        one = NAMES_OF_ONE.get(kind, kind)
        raise ConfigError(f"{where}unknown {one} {wanted!r};{hint} known are {', '.join(tables)}")
    return wanted, tables[wanted]


@cache
def presets(kind: str) -> dict[str, Table]:
    """All presets of a kind, in the order of their file; not to be changed."""
    text = resources.files("ultraep.tools.sim").joinpath("data", f"{kind}.toml").read_text("utf-8")
    return tomllib.loads(text)


def load_record(make: type[Record], kind: str, name: str) -> Record:
    """Return a preset of a kind, or a table of a file, as a dataclass with a name."""
    own_name, table = load_table(kind, name)
    return as_record(make, {"name": own_name, **table}, f"{NAMES_OF_ONE[kind]} {name}")


def as_record(make: type[Record], table: Table, where: str) -> Record:
    """A dataclass from a table; fields that are missing, unknown or of a wrong type are named."""
    fields = {field.name: field for field in dataclasses.fields(make)}  # type: ignore[arg-type]
    unknown = sorted(set(table) - set(fields))
    if unknown:
        near = difflib.get_close_matches(unknown[0], fields, n=1)
        raise ConfigError(
            f"{where}: unknown entry {unknown[0]!r}"
            + (f"; did you mean {near[0]}?" if near else f"; known are {', '.join(fields)}")
        )
    missing = [
        name
        for name, field in fields.items()
        if name not in table and field.default is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} missing")
    for name, value in table.items():
        _check_type(where, name, str(fields[name].type), value)
    return make(**table)


def check_least(
    record: object, names: str, least: float, most: float = LARGEST, where: str = ""
) -> None:
    """Raise unless the named fields of a record lie between `least` and `most`."""
    for name in names.split():
        value = getattr(record, name)
        if not value >= least:
            raise ConfigError(f"{where}{name} must be at least {least:g}, got {value}")
        if value > most:
            raise ConfigError(f"{where}{name} must be at most {most:.10g}, got {value}")


def check_positive(record: object, names: str, where: str = "") -> None:
    """Raise unless the named fields of a record are positive and finite."""
    for name in names.split():
        value = getattr(record, name)
        if not 0 < value <= LARGEST:
            raise ConfigError(f"{where}{name} must be positive, got {value}")


def _check_type(where: str, name: str, annotation: str, value: Any) -> None:
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
    wanted = kinds.get(annotation)
    if wanted and (not isinstance(value, wanted) or isinstance(value, bool)):
        raise ConfigError(f"{where}: {name} must be of type {annotation}, got {value!r}")
    if isinstance(value, (int, float)) and abs(value) > LARGEST:
        raise ConfigError(f"{where}: {name} must be at most {LARGEST}, got {value}")


def _tables_of_file(path: Path) -> dict[str, Table]:
    text = read_text(path, most=MOST_TABLES)
    with reading(path, "TOML"):
        content = tomllib.loads(text)
    tables = {name: table for name, table in content.items() if isinstance(table, dict)}
    if not tables:
        raise FileError(f"{path}: holds no table; a table begins with a line like [my-name]")
    return tables
