"""The faults of a campaign: which fault hits which rank, at which stage.

The seed of a campaign and the number of a fault determine the fault and the run that it hits.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

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
PROCESSES = ("messages", "hybrid", "hosts", *OF_KERNELS)
ANYWHERE = (*PROCESSES, "in-process")
OVER_MESSAGES = ("messages", "hybrid", "in-process")
# Stages of one microbatch that every rank of every plane passes.
FORWARD = ("loads", "plan", "reroute", "dispatch", "experts", "combine")
EVERY = (*FORWARD, "combine back", "experts back", "dispatch back")
# Ranges of delays, as a multiple of the timeout of the balancers.
INSTANT, SHORT, LONG = (0.0, 0.0), (0.05, 0.2), (1.1, 1.3)


class Kind(NamedTuple):
    """A kind of fault: where it can happen, and how long it lasts."""

    planes: tuple[str, ...]
    stages: tuple[str, ...]
    delays: tuple[tuple[float, float], ...] = (INSTANT,)


KINDS = {
    "kill": Kind(PROCESSES, EVERY),
    "stop": Kind(PROCESSES, EVERY, (SHORT, LONG)),
    "slow": Kind(ANYWHERE, EVERY, (SHORT,)),
    "router": Kind(ANYWHERE, ("router",)),
    "network": Kind(ANYWHERE, ("experts", "experts back")),
    "hook": Kind(ANYWHERE, EVERY),
    "planner": Kind(OVER_MESSAGES, ("plan",)),
    "digest": Kind(ANYWHERE, ("loads", "plan", "combine back")),
    "full disk": Kind(("in-process",), EVERY),
    "clock": Kind(ANYWHERE, EVERY),
    "lost messages": Kind(("hosts",), EVERY),
    "delayed messages": Kind(("hosts",), EVERY, (SHORT,)),
    "device": Kind(OF_KERNELS, ("router",)),
}


@dataclass(frozen=True)
class Fault:
    """One fault, and the run that it hits.

    rank, stage, microbatch: where it happens; the first time that the rank begins this stage in
        this microbatch or a later one. Microbatches of all layers count from 1.
    delay: how long the fault lasts, as a multiple of the timeout of the balancers.
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


def draw_fault(seed: int, number: int) -> Fault:
    """Draw a fault. The kinds take turns; everything else is random."""
    rng = np.random.default_rng([seed, number])
    name = list(KINDS)[number % len(KINDS)]
    kind = KINDS[name]
    plane = str(rng.choice(kind.planes))
    ranks = int(rng.choice(PLANES[plane]))
    return Fault(
        number,
        name,
        int(rng.integers(ranks)),
        str(rng.choice(kind.stages)),
        int(rng.integers(1, 4)),
        round(float(rng.uniform(*rng.choice(kind.delays))), 3),
        plane,
        ranks,
        int(rng.integers(1 << 31)),
    )


def draw_faults(seed: int, kinds: Collection[str], planes: Collection[str]) -> Iterator[Fault]:
    """Draw faults without end; skip other kinds and planes."""
    assert any(set(KINDS[kind].planes) & set(planes) for kind in kinds)
    for number in count():
        fault = draw_fault(seed, number)
        if fault.kind in kinds and fault.plane in planes:
            yield fault
