"""Records of measured numbers, each with the command, device and versions to repeat it."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from ultraep import __version__, workload
from ultraep_tools.machine import usable_cores, version_of
from ultraep_tools.report.words import counted

HERE, WORKLOAD = Path(__file__).parent, Path(workload.__file__).parent
PACKAGES = ("numpy", "numba", "scipy", "torch", "triton")
IF_INSTALLED = ("megatron_core", "transformer_engine", "deep_ep")


@dataclass(frozen=True, slots=True)
class MeasuredNumber:
    """One number, with everything that is needed to interpret and repeat it."""

    benchmark: str
    case: Mapping[str, str | int | float]
    metric: str
    value: float
    unit: str
    device: str
    versions: Mapping[str, str]
    command: str
    date: str
    inputs: str  # hash of the case and of the code that draws its seeded inputs
    routes: str  # digest of the plan: loads, replicas and the split of rows; empty: none


def hash_of_inputs(case: Mapping[str, str | int | float], script: str) -> str:
    """Return a hash of a case and of the code that draws its inputs; all inputs are seeded."""
    code = json.dumps(case).encode() + _code_of_inputs(Path(script).name)
    return hashlib.blake2b(code, digest_size=8).hexdigest()


@cache
def _code_of_inputs(script: str) -> bytes:
    paths = (HERE / script, HERE / "load_cases.py", *sorted(WORKLOAD.glob("*.py")))
    return b"".join(path.read_bytes() for path in paths if path.is_file())


def as_json(rows: Iterable[MeasuredNumber]) -> str:
    """Return a JSON list with one number per line."""
    lines = (json.dumps(asdict(row), separators=(",", ":")) for row in rows)
    return "[\n" + ",\n".join(lines) + "\n]\n"


def cpu_device() -> str:
    """Return the name of the CPU and the number of usable cores."""
    return f"{_cpu_name()}, {counted(usable_cores(), 'core')}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of this package and its numerical dependencies, without importing."""
    numbers = {"ultraep": __version__, "python": platform.python_version()}
    numbers |= {package: version_of(package) or "not installed" for package in PACKAGES}
    optional = {package: version_of(package) for package in IF_INSTALLED}
    return numbers | {package: version for package, version in optional.items() if version}
