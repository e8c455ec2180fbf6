"""The job: ranks by the cores of a machine, tokens by its memory, steps by time; and an estimate.

The estimate divides the operations of the model by the speed of one core in small NumPy products.
Training on CPU ranks reaches a fixed share of that speed, measured on two ARM cores.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ultraep.errors import ConfigError

MOST_RANKS, EXPERTS = 8, 32
GIB = 1 << 30
PROCESS = 0.45 * GIB  # of a rank before it has any weights
FEWEST_TOKENS = 256
REACHED = 0.53  # of the speed of products alone, by whole steps
START_AND_REPORT = 17.0  # seconds
SUBJECTS = 3  # of the text
WARMUP = 1  # rounds of the layers


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


@dataclass(frozen=True)
class Job:
    """What all ranks are to do."""

    sizes: Sizes
    policies: tuple[str, ...]
    out: str
    seed: int = 0
    device: str = "cpu"
    notes: tuple[str, ...] = ()


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
    if sizes.ranks == 1:
        notes.append("one rank: there is nothing to balance")
    elif device == "cpu" and sizes.ranks > units:
        notes.append(
            f"{sizes.ranks} ranks share {units} core{'s' * (units > 1)}: loads are balanced, but "
            "times mean little, since ranks that share a core do not run at the same time"
        )
    return sizes, notes


def default_ranks(units: int, device: str) -> int:
    """The largest power of two that has a core or GPU each; two at least, on CPUs."""
    fitting = 1 << (max(1, min(units, MOST_RANKS)).bit_length() - 1)
    return fitting if device == "cuda" else max(2, fitting)


def fit_memory(
    sizes: Sizes, machine: Machine, policies: int, *, may_drop_ranks: bool
) -> tuple[Sizes, list[str]]:
    """Smaller microbatches, then fewer ranks, until the memory suffices."""
    free, original = machine.memory, sizes
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
    if sizes != original:
        notes.append(
            f"{free / GIB:.1f} GiB of memory are free: {sizes.tokens} tokens per rank in place of "
            f"{original.tokens}, ranks: {sizes.ranks} in place of {original.ranks}"
        )
    if sizes.memory(policies) > free:
        needed = sizes.memory(policies) / GIB
        notes.append(f"it needs about {needed:.1f} GiB, more than is free, and may fail")
    return sizes, notes


def core_speed(dtype: str, tries: int = 40) -> float:
    """Operations per second of one core, in products too small for several threads."""
    left, right = np.ones((32, 64), dtype), np.ones((64, 128), dtype)
    fastest = float("inf")
    for _ in range(tries):
        begin = time.perf_counter()
        left @ right
        fastest = min(fastest, time.perf_counter() - begin)
    return 2 * 32 * 64 * 128 / fastest


def expected_seconds(sizes: Sizes, policies: int, cores: int, speed: float) -> float:
    """Seconds of the whole demo. speed: operations per second of one core.

    >>> round(expected_seconds(Sizes(ranks=2), policies=2, cores=2, speed=13.4e9))
    256
    """
    speed = REACHED * speed * min(1.0, cores / sizes.ranks)
    experts = 6 * sizes.layers * sizes.top_k * sizes.hidden * sizes.ffn  # of a token, forward
    attention = sizes.layers * (8 * sizes.hidden**2 + 4 * sizes.length * sizes.hidden)
    training = policies * sizes.steps * 3 * sizes.tokens * (experts + attention) / speed
    if sizes.seconds is not None:
        training = min(training, sizes.seconds)
    request_tokens = sizes.requests * (min(32, sizes.longest) + sizes.longest) / 2 / sizes.ranks
    requests = policies * sizes.rounds * request_tokens * (experts + attention) / speed
    layer_round = 3 * sizes.tokens * experts * SUBJECTS / speed
    layers = (policies + 1) * (WARMUP + sizes.layer_rounds) * layer_round
    return training + requests + layers + START_AND_REPORT


def _core_limit() -> int | None:
    """Whole cores of the container's quota."""
    quota, _, period = _text("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if not quota.isdigit() or not period.isdigit():
        return None
    return max(1, int(quota) // int(period))


def _free_memory() -> int | None:
    """Bytes that can be had now: of the host, and of the container."""
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
