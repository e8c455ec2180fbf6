"""How much of the demo fits a machine: ranks by its cores, tokens by its memory, steps by time."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from ultraep.errors import ConfigError

MOST_RANKS, EXPERTS = 8, 32
GIB = 1 << 30
PROCESS = 0.45 * GIB  # of a rank before it has any weights
FEWEST_TOKENS = 256


@dataclass(frozen=True)
class Machine:
    """What there is to use. `memory` in bytes; None: not known."""

    cores: int
    memory: int | None
    gpus: int = 0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The model, the training, the requests and the measurement; tokens are those of one rank."""

    ranks: int
    experts: int = EXPERTS
    top_k: int = 4
    layers: int = 4
    hidden: int = 128
    ffn: int = 256
    heads: int = 4
    slots: int = 1
    tokens: int = 1024
    length: int = 128
    dtype: str = "float64"  # on CPUs: roundings do not grow to differences that one could see
    steps: int = 100
    seconds: float | None = 110.0  # that the training may take: fewer steps if need be; None: all
    even: float = 1e-3  # weight of the auxiliary loss of a layer
    lr: float = 2e-3
    requests: int = 96
    longest: int = 512
    rounds: int = 3  # of the requests
    layer_rounds: int = 6

    def memory(self, policies: int) -> int:
        """Bytes that all ranks need, roughly."""
        expert = 3 * self.hidden * self.ffn
        weights = 4 * self.layers * (self.experts / self.ranks * expert + 4 * self.hidden**2)
        rows = 1.5 * self.tokens * self.top_k
        activations = 4 * self.layers * rows * (8 * self.hidden + 10 * self.ffn)
        numbers = (4 * policies + 1) * weights + 2 * activations
        return int(self.ranks * (PROCESS + numbers * (2 if self.dtype == "float64" else 1)))


QUICK = {
    "hidden": 96,
    "ffn": 192,
    "dtype": "float32",  # in few steps no rounding grows
    "steps": 30,
    "seconds": 18.0,
    "requests": 48,
    "rounds": 1,
    "layer_rounds": 3,
}


def this_machine() -> Machine:
    """Cores and memory that this process may use, within the limits of its container."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return Machine(min(cores, _core_limit() or cores), _free_memory())


def choose(
    machine: Machine,
    *,
    quick: bool = False,
    ranks: int | None = None,
    steps: int | None = None,
    device: str = "cpu",
    policies: int = 2,
) -> tuple[Sizes, list[str]]:
    """Sizes for a machine, and what is to be said about them."""
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {steps}")
    if ranks is not None and not 1 <= ranks <= EXPERTS:
        raise ConfigError(f"--ranks must lie between 1 and {EXPERTS}, the experts; got {ranks}")
    units = machine.gpus if device == "cuda" else machine.cores
    sizes = Sizes(ranks=ranks or default_ranks(units, device))
    if device == "cuda":
        sizes = replace(sizes, dtype="float32")
    if quick:
        sizes = replace(sizes, **QUICK)  # type: ignore[arg-type]
    if steps is not None:
        sizes = replace(sizes, steps=steps, seconds=None)
    sizes, notes = fit_memory(sizes, machine, policies, may_drop_ranks=ranks is None)
    # Of two ranks only one can help the other: one copy is not always enough for that.
    sizes = replace(sizes, slots=2 if sizes.ranks == 2 else 1)
    return sizes, [*notes, *words_about_ranks(sizes, units, device)]


def default_ranks(units: int, device: str) -> int:
    """The largest power of two that has a core or GPU each; two at least, on CPUs."""
    fitting = 1 << (max(1, min(units, MOST_RANKS)).bit_length() - 1)
    return fitting if device == "cuda" else max(2, fitting)


def fit_memory(
    sizes: Sizes, machine: Machine, policies: int, *, may_drop_ranks: bool
) -> tuple[Sizes, list[str]]:
    """Smaller microbatches, then fewer ranks, until the memory suffices."""
    free, wanted = machine.memory, sizes
    if free is None:
        return sizes, []
    while sizes.memory(policies) > free:
        if sizes.tokens > FEWEST_TOKENS:
            sizes = replace(sizes, tokens=sizes.tokens // 2)
        elif sizes.ranks > 2 and may_drop_ranks:
            sizes = replace(sizes, ranks=sizes.ranks // 2)
        else:
            break
    notes = []
    if sizes != wanted:
        notes.append(
            f"{free / GIB:.1f} GiB of memory are free: {sizes.tokens} tokens per rank in place of "
            f"{wanted.tokens}, ranks: {sizes.ranks} in place of {wanted.ranks}"
        )
    if sizes.memory(policies) > free:
        needed = sizes.memory(policies) / GIB
        notes.append(f"it needs about {needed:.1f} GiB, more than is free, and may fail")
    return sizes, notes


def words_about_ranks(sizes: Sizes, units: int, device: str) -> list[str]:
    """What the number of ranks means for the figures."""
    if sizes.ranks == 1:
        return ["one rank: there is nothing to balance"]
    if device == "cpu" and sizes.ranks > units:
        return [
            f"{sizes.ranks} ranks share {units} core{'s' * (units > 1)}: loads are balanced, but "
            "seconds say little, as no rank waits while another one works"
        ]
    return []


def _core_limit() -> int | None:
    """Whole cores of the container's quota."""
    quota, _, period = _line("/sys/fs/cgroup/cpu.max").partition(" ")
    if not quota.isdigit() or not period.isdigit():
        return None
    return max(1, int(quota) // int(period))


def _free_memory() -> int | None:
    """Bytes that can be had now: of the host, and of the container."""
    found = []
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    limit, used = (_line(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        found.append(max(0, int(limit) - int(used)))
    return min(found, default=None)


def _line(path: str) -> str:
    return _text(path).partition("\n")[0].strip()


def _text(path: str) -> str:
    try:
        return Path(path).read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return ""
