"""The job of the demo, fitted to the cores of the machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ultraep.errors import ConfigError
from ultraep_tools.machine import usable_cores
from ultraep_tools.report.words import counted

MOST_RANKS, EXPERTS = 4, 32


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of model, training, requests and measurement; tokens are per rank."""

    ranks: int
    experts: int = EXPERTS
    top_k: int = 4
    layers: int = 4
    hidden: int = 128
    ffn: int = 256
    heads: int = 4
    slots: int = 1
    tokens: int = 1024
    length: int = 128  # of a sequence
    dtype: str = "float64"  # rounding differences stay invisible
    steps: int = 36
    even: float = 1e-3  # weight of a layer's auxiliary loss
    lr: float = 2e-3
    requests: int = 96
    longest: int = 512
    rounds: int = 3  # of serving the requests
    layer_rounds: int = 6


@dataclass(frozen=True)
class Job:
    """The work of all ranks."""

    sizes: Sizes
    policies: tuple[str, ...]
    out: str
    seed: int = 0
    notes: tuple[str, ...] = ()


QUICK: dict[str, Any] = {
    "hidden": 96,
    "ffn": 192,
    "dtype": "float32",  # rounding differences stay invisible in few steps
    "steps": 21,
    "requests": 48,
    "rounds": 1,
    "layer_rounds": 3,
}


def cores_here() -> int:
    """Return the cores that this process may use, within its container's limits."""
    cores = usable_cores()
    return min(cores, _core_limit() or cores)


def choose(
    cores: int, *, quick: bool = False, ranks: int | None = None, steps: int | None = None
) -> tuple[Sizes, list[str]]:
    """Return sizes for a machine with these cores, and notes about them."""
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {steps}")
    if ranks is not None and not 1 <= ranks <= EXPERTS:
        raise ConfigError(f"--ranks must lie between 1 and {EXPERTS} (the experts), got {ranks}")
    # By default, the largest power of two with a core each, but at least two.
    fitting = 1 << (max(2, min(cores, MOST_RANKS)).bit_length() - 1)
    sizes, notes = Sizes(ranks=ranks or fitting, **(QUICK if quick else {})), []
    if steps is not None:
        sizes = replace(sizes, steps=steps)
    # With two ranks, only one other rank can take rows, and one replica is not always enough.
    sizes = replace(sizes, slots=2 if sizes.ranks == 2 else 1)
    if sizes.ranks == 1:
        notes.append("one rank: there is nothing to balance")
    elif sizes.ranks > cores:
        notes.append(
            f"{sizes.ranks} ranks share {counted(cores, 'core')}: loads are balanced, but "
            "times mean little, because ranks on one core do not run at the same time"
        )
    return sizes, notes


def _core_limit() -> int | None:
    """Return the whole cores of the container's quota."""
    quota, _, period = _quota().strip().partition(" ")
    if not quota.isdigit() or not period.isdigit():
        return None
    return max(1, int(quota) // int(period))


def _quota() -> str:
    try:
        return Path("/sys/fs/cgroup/cpu.max").read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return ""
