"""Meter: an observer that counts the plans and bytes of a balancer.

Plans on the host are counted on the host. Plans on a device are counted by a kernel after the
planner; a CUDA graph captures this kernel, so replays are counted too. A reading copies the few
sums to the host without blocking the step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from ultraep.backends import BACKENDS
from ultraep.errors import ConfigError
from ultraep.microbatch import AnyPlan, MicrobatchInfo
from ultraep.plan import Plan
from ultraep.runtime.observe import Later
from ultraep.runtime.stats import Stats
from ultraep.runtime.streams import Fetch
from ultraep.topology import Topology

if TYPE_CHECKING:
    from ultraep.backends.triton.history import PlanSums

MOST_PENDING = 64  # replica counts that may still be on the device
PARTS = 100_000  # the kernel counts imbalances in parts of 1 / PARTS
# The kernel writes the first six sums.
ORDER = ("microbatches", "copies", "skipped", "before", "after", "worst", "weights", "gradients")
WORST = ORDER.index("worst")


def stats_of(sums: list[int], ranks: int = 1) -> Stats:
    """Sums of a device as `Stats`. ranks: number of ranks whose bytes are in the sums."""
    microbatches, copies, skipped, before, after, worst, weights, gradients = sums
    stats = Stats(microbatches, copies, skipped, before / PARTS, after / PARTS, worst / PARTS)
    stats.bytes_sent |= {"weights": weights // ranks, "gradients": gradients // ranks}
    return stats


class Meter:
    """Sums of one balancer since the meter was created.

    On a device, each rank reports an equal share of the bytes of all ranks. The worst imbalance
    starts anew with every fetch.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._host = Stats()
        self._devices: dict[torch.device, PlanSums] = {}
        self._replicas: WeakKeyDictionary[MicrobatchInfo, torch.Tensor] = WeakKeyDictionary()
        self._pending: deque[tuple[str, int, Later]] = deque()  # what, bytes of each, replicas
        triton = any(info.name == "triton" and info.available for info in BACKENDS)
        if triton and torch.cuda.is_initialized():  # allocate before a graph is captured
            self._sums_on(torch.empty(0, device="cuda").device)

    def begin(self, _stage: str, _microbatch: MicrobatchInfo) -> None:
        """Do nothing: clocks measure the time."""

    end = begin

    def planned(self, microbatch: MicrobatchInfo, plan: AnyPlan) -> None:
        if isinstance(plan, Plan):
            self._host.add_plan(plan)
            return
        on_device: Any = plan
        self._replicas[microbatch] = on_device.num_replicas
        self._sums_on(on_device.result.device).add(
            on_device.num_replicas, on_device.rank_loads, on_device.replicas, on_device.quotas
        )

    def sent(
        self, microbatch: MicrobatchInfo, what: str, nbytes: int, copies: int | Later | None
    ) -> None:
        if isinstance(copies, int):
            self._host.bytes_sent[what] += nbytes * copies
        elif copies is not None:
            self._pending.append((what, nbytes, copies))
            self.settle(MOST_PENDING)
        elif microbatch in self._replicas:  # else it was planned before the meter existed
            replicas = self._replicas[microbatch]
            sums = self._devices[replicas.device].sums
            sums[ORDER.index(what)].add_(replicas[0], alpha=nbytes)

    def settle(self, most: int = 0) -> None:
        """Count all but the `most` latest pending replica counts; waits for the device."""
        while len(self._pending) > most:
            what, nbytes, copies = self._pending.popleft()
            self._host.bytes_sent[what] += nbytes * copies()

    @torch.inference_mode(False)  # the sums are also updated outside of inference mode
    def _sums_on(self, device: torch.device) -> PlanSums:
        """The sums on a device, allocated on first use."""
        if device not in self._devices:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ConfigError(
                    f"metrics have no memory on {device} and cannot allocate during the capture of "
                    "a graph; create Metrics after torch.cuda.init(), or run one step before the "
                    "capture"
                )
            from ultraep.backends.triton.history import PlanSums  # needs triton

            sums = torch.zeros(len(ORDER), dtype=torch.int64, device=device)
            homes = self._topology.home_of_expert
            self._devices[device] = PlanSums(sums, homes, self._topology.ranks)
        return self._devices[device]

    def fetch(self) -> Fetched:
        """Start to copy the sums to the host. Does not block."""
        host = replace(self._host, bytes_sent=defaultdict(int, self._host.bytes_sent))
        self._host.worst = 0.0
        devices = []
        for on_device in self._devices.values():
            devices.append(Fetch(on_device.sums))
            on_device.sums[WORST].zero_()
        return Fetched(host, devices, self._topology.ranks)


@dataclass(frozen=True)
class Fetched:
    """Sums of which the device part may still be on its way to the host."""

    host: Stats
    devices: list[Fetch]
    ranks: int

    def ready(self) -> bool:
        """Whether all sums have arrived."""
        return all(fetch.here() for fetch in self.devices)

    def parts(self) -> list[Stats]:
        """The sums of the host and of every device; waits until they have arrived."""
        return [self.host, *(stats_of(f.wait().tolist(), self.ranks) for f in self.devices)]
