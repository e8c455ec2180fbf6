"""Presets and your own TOML files, read into dataclasses.

A name selects a preset. `file.toml` selects the first table of a file, `file.toml:name` another.
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

LARGEST = 10**15  # any number in a table
MAX_FILE_BYTES = 1 << 15  # tomllib can take seconds for a file of this size
TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}


@cache
def presets(kind: str) -> dict[str, Table]:
    """Return all presets of a kind ("clusters", "models", ...) in file order. Read-only."""
    text = resources.files("ultraep_tools.sim").joinpath("data", f"{kind}.toml").read_text("utf-8")
    return tomllib.loads(text)


def load_table(kind: str, name: str) -> Table:
    """Return the table of a preset or of a file, with its name as an entry."""
    path, _, table_name = name.partition(":") if ".toml" in name else ("", "", name)
    tables = _read_tables(Path(path)) if path else presets(kind)
    if path and not table_name:
        table_name = next(iter(tables))
    if table_name not in tables:
        near = difflib.get_close_matches(table_name, tables, n=1, cutoff=0.4)
        hint = f" did you mean {near[0]}?" if near else ""
        where = f"{path}: " if path else ""
        raise ConfigError(
            f"{where}unknown {kind[:-1]} {table_name!r};{hint} choose from {', '.join(tables)}"
        )
    return {"name": table_name, **tables[table_name]}


def _read_tables(path: Path) -> dict[str, Table]:
    text = read_text(path, most=MAX_FILE_BYTES)
    with reading(path, "TOML"):
        content = tomllib.loads(text)
    tables = {name: table for name, table in content.items() if isinstance(table, dict)}
    if not tables:
        raise FileError(f"{path}: holds no table; a table begins with a line like [my-name]")
    return tables


def as_record(record_type: type[Record], table: Table, where: str) -> Record:
    """Return a table as a dataclass. Errors name missing, unknown and mistyped entries."""
    fields = {field.name: field for field in dataclasses.fields(record_type)}  # type: ignore[arg-type]
    unknown = sorted(set(table) - set(fields))
    if unknown:
        near = difflib.get_close_matches(unknown[0], fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(fields)}"
        raise ConfigError(f"{where}: unknown entry {unknown[0]!r}; {hint}")
    required = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
    missing = [name for name in required if name not in table]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} missing")
    for name, value in table.items():
        annotation = str(fields[name].type)
        types = TYPES.get(annotation)
        if types and (not isinstance(value, types) or isinstance(value, bool)):
            raise ConfigError(f"{where}: {name} must be of type {annotation}, got {value!r}")
        if isinstance(value, (int, float)) and abs(value) > LARGEST:
            raise ConfigError(f"{where}: {name} must be at most {LARGEST}, got {value}")
    return record_type(**table)


def check_range(
    record: object, names: str, least: float, most: float = LARGEST, where: str = ""
) -> None:
    """Raise unless the named fields of a record lie between `least` and `most`."""
    for name in names.split():
        value = getattr(record, name)
        if not value >= least:
            raise ConfigError(f"{where}{name} must be at least {least:g}, got {value}")
        if value > most:
            raise ConfigError(f"{where}{name} must be at most {most:.10g}, got {value}")


def check_positive(record: object, names: str, where: str) -> None:
    """Raise unless the named fields of a record are positive and finite."""
    for name in names.split():
        value = getattr(record, name)
        if not 0 < value <= LARGEST:
            raise ConfigError(f"{where}{name} must be positive, got {value}")
