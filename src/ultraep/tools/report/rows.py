"""Numbers to keep: each carries all that is needed to read it alone, or to measure it again."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ultraep import __version__

PACKAGES = ("numpy", "numba", "scipy", "torch", "triton")


@dataclass(frozen=True, slots=True)
class MeasuredNumber:
    """One number, and all that is needed to understand and to repeat it."""

    benchmark: str
    case: Mapping[str, str | int | float]
    metric: str
    value: float
    unit: str
    device: str
    versions: Mapping[str, str]
    command: str
    date: str


def as_json(rows: Iterable[MeasuredNumber]) -> str:
    """A JSON list, one number a line."""
    lines = (json.dumps(asdict(row), separators=(",", ":")) for row in rows)
    return "[\n" + ",\n".join(lines) + "\n]\n"


def cpu_device() -> str:
    """The CPU by name, and how many of its cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return f"{_cpu_name()}, {cores} core{'s' if cores > 1 else ''}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of this package and of what it computes with; nothing is imported for it."""
    numbers = {"ultraep": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            numbers[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            numbers[package] = "not installed"
    return numbers
