"""The schedule of a fault campaign: which fault hits which rank, at which stage.

A fault is drawn from the seed of the campaign and its number alone, so a campaign can be repeated,
and each of its faults by itself. A schedule file holds one fault per line:

    {"version": 1, "seed": 7, "faults": [
    {"number": 0, "kind": "kill", "rank": 1, "stage": "dispatch", "microbatch": 3, ...}
    ]}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ultraep.errors import FileError
from ultraep.files.reading import read_text
from ultraep.files.writing import write_text
from ultraep.trace.schema import STAGES

VERSION = 1
MOST_FAULTS = 1_000_000
MOST_RANKS, MOST_MICROBATCHES, MOST_DELAY = 64, 10_000, 3600.0

# Data planes of a run, and the number of ranks that it may have.
PLANES = {
    "messages": (2, 3, 4),
    "kernels": (2, 3),  # messages, planned by Triton kernels
    "mapped": (2, 3),  # mapped memory
    "hybrid": (4,),  # two domains of two ranks
    "hosts": (2, 4),  # two network namespaces
    "in-process": (2, 3, 4),  # ranks are threads
}
OF_KERNELS = ("kernels", "mapped")
DISKS = ("full disk", "read-only disk")  # kinds of faults
PROCESSES = ("messages", "hybrid", "hosts", *OF_KERNELS)
ANYWHERE = (*PROCESSES, "in-process")
OVER_MESSAGES = ("messages", "hybrid", "in-process")
# Stages of one microbatch that every rank of every plane passes.
FORWARD = ("loads", "plan", "reroute", "dispatch", "experts", "combine")
EVERY = (*FORWARD, "combine back", "experts back", "dispatch back")
SHORT, LONG = "short", "long"


class Kind(NamedTuple):
    """A kind of fault: where it can happen, and how long it lasts.

    delays: "short": much less than the timeout, so that the run survives; "long": more than the
        timeout; "": the fault has no duration.
    """

    planes: tuple[str, ...]
    stages: tuple[str, ...]
    delays: tuple[str, ...] = ("",)


KINDS = {
    "kill": Kind(PROCESSES, EVERY),
    "stop": Kind(PROCESSES, EVERY, (SHORT, LONG)),
    "slow": Kind(ANYWHERE, EVERY, (SHORT,)),
    "router": Kind(ANYWHERE, ("router",)),
    "network": Kind(ANYWHERE, ("experts", "experts back")),
    "hook": Kind(ANYWHERE, EVERY),
    "planner": Kind(OVER_MESSAGES, ("plan",)),
    "digest": Kind(ANYWHERE, ("loads", "plan", "combine back")),
    "full disk": Kind(("messages",), ("trace", "checkpoint")),
    "read-only disk": Kind(("messages",), ("trace", "checkpoint")),
    "clock": Kind(ANYWHERE, EVERY),
    "lost messages": Kind(("hosts",), EVERY),
    "delayed messages": Kind(("hosts",), EVERY, (SHORT,)),
    "device": Kind(OF_KERNELS, ("router",)),
}
STAGE_NAMES = (*STAGES, "router", "trace", "checkpoint")


@dataclass(frozen=True)
class Fault:
    """One fault, and the run that it hits.

    rank, stage, microbatch: where it happens; the first time that the rank begins this stage in
        this microbatch or a later one. Microbatches of all layers count from 1.
    delay: seconds that the fault lasts.
    plane, ranks: of the run.   seed: of its model, sizes, policy and other settings.
    """

    number: int
    kind: str
    rank: int
    stage: str
    microbatch: int
    delay: float
    plane: str
    ranks: int
    seed: int

    def __str__(self) -> str:
        return (
            f"fault {self.number}: {self.kind} on rank {self.rank} of {self.ranks} at {self.stage} "
            f"of microbatch {self.microbatch} ({self.plane})"
        )


def draw_fault(
    seed: int, number: int, timeout: float, planes: Sequence[str], kinds: Sequence[str]
) -> Fault:
    """Draw a fault. The kinds take turns; everything else is random."""
    rng = np.random.default_rng([seed, number])
    name = kinds[number % len(kinds)]
    kind = KINDS[name]
    plane = str(rng.choice([plane for plane in kind.planes if plane in planes]))
    ranks = int(rng.choice(PLANES[plane]))
    delay = {
        SHORT: round(float(rng.uniform(0.05, 0.2) * timeout), 2),
        LONG: round(timeout + float(rng.uniform(1.0, 2.0)), 2),
        "": 0.0,
    }[str(rng.choice(kind.delays))]
    return Fault(
        number,
        name,
        int(rng.integers(ranks)),
        str(rng.choice(kind.stages)),
        int(rng.integers(1, 4)),
        delay,
        plane,
        ranks,
        int(rng.integers(1 << 31)),
    )


def possible_kinds(planes: Sequence[str]) -> list[str]:
    """Return the kinds of faults that can happen on these planes."""
    return [name for name, kind in KINDS.items() if set(kind.planes) & set(planes)]


# -- files ---------------------------------------------------------------------------------------


def write_schedule(path: str | Path, seed: int, faults: Sequence[Fault]) -> None:
    """Write a schedule, one fault per line."""
    lines = ",\n".join(json.dumps(asdict(fault)) for fault in faults)
    write_text(path, f'{{"version": {VERSION}, "seed": {seed}, "faults": [\n{lines}\n]}}\n')


def read_schedule(path: str | Path) -> tuple[int, list[Fault]]:
    """Return the seed and the faults of a schedule file; damage is a `FileError`."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not a schedule in JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("faults"), list):
        raise FileError(f'{path}: not a schedule: it needs {{"version", "seed", "faults": [...]}}')
    if content.get("version") != VERSION:
        raise FileError(
            f"{path}: version {content.get('version')!r} of a schedule, but this program reads "
            f"version {VERSION}"
        )
    if not 1 <= len(content["faults"]) <= MOST_FAULTS:
        raise FileError(
            f"{path}: {len(content['faults'])} faults, but 1..{MOST_FAULTS} are possible"
        )
    seed = content.get("seed")
    if type(seed) is not int or seed < 0:
        raise FileError(f"{path}: seed must be an integer of at least 0, got {seed!r}")
    faults = [_fault(f"{path}: fault {place}", row) for place, row in enumerate(content["faults"])]
    if len({fault.number for fault in faults}) < len(faults):
        raise FileError(f"{path}: two faults have the same number")
    return seed, faults


def _fault(where: str, row: Any) -> Fault:
    known = {field.name: str(field.type) for field in fields(Fault)}
    if not isinstance(row, dict) or not set(row) <= set(known):
        wrong = sorted(set(row) - set(known)) if isinstance(row, dict) else row
        raise FileError(f"{where}: unknown fields {wrong!r}; it may have {', '.join(known)}")
    missing = sorted(set(known) - set(row))
    if missing:
        raise FileError(f"{where}: {', '.join(missing)} missing")
    for name, value in row.items():
        types: tuple[type, ...] = {"int": (int,), "float": (int, float), "str": (str,)}[known[name]]
        if type(value) not in types:
            raise FileError(f"{where}: {name} must be {known[name]}, got {value!r}")
    fault = Fault(**row | {"delay": float(row["delay"])})
    _check(where, fault)
    return fault


def _check(where: str, fault: Fault) -> None:
    """Raise if a value is out of range, or if the plane cannot have such a fault."""
    for name, value, choices in (
        ("kind", fault.kind, tuple(KINDS)),
        ("plane", fault.plane, tuple(PLANES)),
        ("stage", fault.stage, STAGE_NAMES),
    ):
        if value not in choices:
            raise FileError(f"{where}: {name} must be one of {', '.join(choices)}, got {value!r}")
    if fault.plane not in KINDS[fault.kind].planes:
        raise FileError(f"{where}: {fault.kind!r} is not possible on the plane {fault.plane!r}")
    if fault.plane == "hybrid" and fault.ranks % 2:
        raise FileError(
            f"{where}: the plane 'hybrid' needs an even number of ranks, got {fault.ranks}"
        )
    for name, number, least, most in (
        ("ranks", fault.ranks, 2, MOST_RANKS),
        ("rank", fault.rank, 0, fault.ranks - 1),
        ("microbatch", fault.microbatch, 1, MOST_MICROBATCHES),
        ("delay", fault.delay, 0, MOST_DELAY),
        ("seed", fault.seed, 0, 1 << 62),
        ("number", fault.number, 0, MOST_FAULTS),
    ):
        if not least <= number <= most:
            raise FileError(f"{where}: {name} must lie in {least}..{most}, got {number}")
