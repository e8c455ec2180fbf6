"""The job of the demo, fitted to the machine's cores and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ultraep.errors import ConfigError
from ultraep_tools.machine import usable_cores
from ultraep_tools.report.words import counted

MOST_RANKS, EXPERTS = 8, 32
GIB = 1 << 30
PROCESS = 0.6 * GIB  # memory of a rank without activations


@dataclass(frozen=True)
class Machine:
    """Usable cores, and free memory in bytes; None if unknown."""

    cores: int
    memory: int | None


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
    steps: int = 100
    even: float = 1e-3  # weight of a layer's auxiliary loss
    lr: float = 2e-3
    requests: int = 96
    longest: int = 512
    rounds: int = 3  # of serving the requests
    layer_rounds: int = 6

    def memory(self) -> int:
        """Return the approximate bytes that all ranks need; activations dominate."""
        width = 4 if self.dtype == "float32" else 8
        row = width * self.layers * (8 * self.hidden + 10 * self.ffn)
        return int(self.ranks * (PROCESS + 3 * self.tokens * self.top_k * row))


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
    "steps": 30,
    "requests": 48,
    "rounds": 1,
    "layer_rounds": 3,
}


def this_machine() -> Machine:
    """Return the cores and memory that this process may use, within its container's limits."""
    cores = usable_cores()
    return Machine(min(cores, _core_limit() or cores), _free_memory())


def choose(
    machine: Machine, *, quick: bool = False, ranks: int | None = None, steps: int | None = None
) -> tuple[Sizes, list[str]]:
    """Return sizes for a machine, and notes about them."""
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {steps}")
    if ranks is not None and not 1 <= ranks <= EXPERTS:
        raise ConfigError(f"--ranks must lie between 1 and {EXPERTS} (the experts), got {ranks}")
    # By default, the largest power of two with a core each, but at least two.
    fitting = 1 << (max(2, min(machine.cores, MOST_RANKS)).bit_length() - 1)
    sizes, notes = Sizes(ranks=ranks or fitting, **(QUICK if quick else {})), []
    if steps is not None:
        sizes = replace(sizes, steps=steps)
    if machine.memory is not None and sizes.memory() > machine.memory:
        while ranks is None and sizes.ranks > 2 and sizes.memory() > machine.memory:
            sizes = replace(sizes, ranks=sizes.ranks // 2)
        notes.append(
            f"{machine.memory / GIB:.1f} GiB of memory are free, and "
            f"{counted(sizes.ranks, 'rank')} need about {sizes.memory() / GIB:.1f} GiB"
        )
    # With two ranks, only one other rank can take rows, and one replica is not always enough.
    sizes = replace(sizes, slots=2 if sizes.ranks == 2 else 1)
    if sizes.ranks == 1:
        notes.append("one rank: there is nothing to balance")
    elif sizes.ranks > machine.cores:
        notes.append(
            f"{sizes.ranks} ranks share {counted(machine.cores, 'core')}: loads are balanced, but "
            "times mean little, because ranks on one core do not run at the same time"
        )
    return sizes, notes


def _core_limit() -> int | None:
    """Return the whole cores of the container's quota."""
    quota, _, period = _text("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if not quota.isdigit() or not period.isdigit():
        return None
    return max(1, int(quota) // int(period))


def _free_memory() -> int | None:
    """Return the free bytes of the host, or of the container if it has fewer."""
    limits = []
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    limit, used = (_text(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        limits.append(max(0, int(limit) - int(used)))
    return min(limits, default=None)


def _text(path: str) -> str:
    try:
        return Path(path).read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return ""
