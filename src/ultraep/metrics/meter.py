"""Meter: an observer that counts plans and bytes, on the host or where the plans are.

Plans of the host are counted there. Plans of a device are counted by a kernel behind the planner,
which a graph captures with it: so replays are counted, and nobody waits. The sums are few numbers,
fetched when somebody reads them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from ultraep.backends import BACKENDS
from ultraep.errors import ConfigError
from ultraep.microbatch import AnyPlan, MicrobatchInfo
from ultraep.plan import Plan
from ultraep.runtime.observe import Later
from ultraep.runtime.streams import Fetch
from ultraep.topology import Topology

if TYPE_CHECKING:
    from ultraep.backends.triton.history import PlanSums

MOST_COMING = 64  # numbers that a device has not told yet; older ones are known by then
PARTS = 100_000  # of one, in sums of imbalances
# The first six are those of the kernel.
ORDER = ("microbatches", "copies", "skipped", "before", "after", "worst", "weights", "gradients")
WORST = ORDER.index("worst")
BYTES = {name: ORDER.index(name) for name in ("weights", "gradients")}


@dataclass
class Totals:
    """What was counted since the beginning; `worst` is that since the last reading.

    before, after: sums of imbalances.   seconds: of stages, in the microbatches that were `timed`.
    """

    microbatches: int = 0
    copies: int = 0
    skipped: int = 0
    before: float = 0.0
    after: float = 0.0
    worst: float = 0.0
    weights: int = 0
    gradients: int = 0
    timed: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, sums: list[int], ranks: int = 1) -> None:
        """Add sums in their order. ranks: those whose bytes are in them together."""
        found = dict(zip(ORDER, sums, strict=True))
        self.microbatches += found["microbatches"]
        self.copies += found["copies"]
        self.skipped += found["skipped"]
        self.before += found["before"] / PARTS
        self.after += found["after"] / PARTS
        self.worst = max(self.worst, found["worst"] / PARTS)
        self.weights += found["weights"] // ranks
        self.gradients += found["gradients"] // ranks


def add_plan(sums: list[int], plan: Plan) -> None:
    """Count a plan; twin of the kernel `add_plan`."""
    peaks = int(plan.initial_rank_loads.max()), int(plan.rank_loads.max())
    total, ranks = plan.total, plan.topology.ranks
    before, after = (p * ranks * PARTS // total if total else PARTS for p in peaks)
    copies = plan.num_replicas
    for index, number in enumerate((1, copies, int(copies == 0), before, after)):
        sums[index] += number
    sums[WORST] = max(sums[WORST], after)


class Meter:
    """Sums of one balancer. On a device, bytes are an equal part of what all ranks send.

    They only grow, but for the worst imbalance, which begins anew with every reading.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._host = [0] * len(ORDER)
        self._devices: dict[torch.device, PlanSums] = {}
        self._copies: WeakKeyDictionary[MicrobatchInfo, torch.Tensor] = WeakKeyDictionary()
        self._coming: deque[tuple[str, int, Later]] = deque()  # what was sent, bytes of each
        if torch.cuda.is_initialized() and _kernels_run():  # before a graph is captured
            self._sums_on(torch.empty(0, device="cuda").device)

    def begin(self, _stage: str, _microbatch: MicrobatchInfo) -> None:
        """Nothing: clocks take the time."""

    def end(self, _stage: str, _microbatch: MicrobatchInfo) -> None:
        """Nothing: clocks take the time."""

    def planned(self, microbatch: MicrobatchInfo, plan: AnyPlan) -> None:
        if isinstance(plan, Plan):
            add_plan(self._host, plan)
            return
        found: Any = plan
        self._copies[microbatch] = found.num_replicas
        parts = found.num_replicas, found.rank_loads, found.replicas, found.quotas
        self._sums_on(found.result.device).add(*parts)

    def sent(
        self, microbatch: MicrobatchInfo, what: str, nbytes: int, copies: int | Later | None
    ) -> None:
        if isinstance(copies, int):
            self._host[BYTES[what]] += nbytes * copies
            return
        if copies is not None:
            self._coming.append((what, nbytes, copies))
            self.settle(MOST_COMING)
            return
        number = self._copies.get(microbatch)
        if number is None:
            return  # it was planned before anybody counted
        sums = self._devices[number.device].sums
        sums[BYTES[what]].add_(number[0], alpha=nbytes)

    def settle(self, most: int = 0) -> None:
        """Count what a device knows, but for the `most` latest; waits for it."""
        while len(self._coming) > most:
            what, nbytes, copies = self._coming.popleft()
            self._host[BYTES[what]] += nbytes * copies()

    @torch.inference_mode(False)  # they are added to outside of it, too
    def _sums_on(self, device: torch.device) -> PlanSums:
        """The sums on a device, made when they are first needed."""
        if device not in self._devices:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ConfigError(
                    f"metrics have no memory on {device}, and none can be taken while a graph is "
                    "captured: make them when CUDA is in use, or run a step before"
                )
            from ultraep.backends.triton.history import PlanSums  # triton, where it is used

            sums = torch.zeros(len(ORDER), dtype=torch.int64, device=device)
            homes = self._topology.home_of_expert
            self._devices[device] = PlanSums(sums, homes, self._topology.ranks)
        return self._devices[device]

    def fetch(self) -> Fetched:
        """The sums so far; those of a device come when it has come so far, and nobody waits."""
        host, self._host[WORST] = list(self._host), 0
        coming = []
        for found in self._devices.values():
            coming.append(Fetch(found.sums))
            found.sums[WORST].zero_()
        return Fetched(host, coming, self._topology.ranks)


@dataclass(frozen=True)
class Fetched:
    """Sums that are on their way to the host."""

    host: list[int]
    devices: list[Fetch]
    ranks: int

    def here(self) -> bool:
        """Whether all have come."""
        return all(coming.here() for coming in self.devices)

    def add_to(self, totals: Totals) -> None:
        """Add them to others; waits for what has not come."""
        totals.add(self.host)
        for coming in self.devices:
            totals.add(coming.wait().tolist(), self.ranks)


def _kernels_run() -> bool:
    return any(info.name == "triton" and info.available for info in BACKENDS)
