"""Metrics: figures of balancers, read every few steps and passed to sinks.

Passes are counted on the host when they have finished. A CUDA graph captures a kernel that counts
its plan in every replay. A reading copies the few sums to the host without blocking the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from ultraep.backends import BACKENDS
from ultraep.config import NOMINAL_SPEED
from ultraep.errors import ConfigError
from ultraep.passes import PassRecord
from ultraep.runtime.balancer import Balancer
from ultraep.runtime.stats import Stats
from ultraep.runtime.streams import Fetch
from ultraep.topology import Topology

if TYPE_CHECKING:
    from ultraep.backends.triton.history import PlanSums

PARTS = 100_000  # the kernel counts imbalances in parts of 1 / PARTS
# The kernel writes the first six sums.
ORDER = ("microbatches", "replicas", "skipped", "before", "after", "worst", "weights", "gradients")
WORST = ORDER.index("worst")
SPEED = "speed/"  # then the number of a rank


def stats_of(sums: list[int], ranks: int = 1) -> Stats:
    """Sums of a device as `Stats`. ranks: number of ranks whose bytes are in the sums."""
    microbatches, replicas, skipped, before, after, worst, weights, gradients = sums
    stats = Stats(microbatches, replicas, skipped, before / PARTS, after / PARTS, worst / PARTS)
    stats.bytes_sent |= {"weights": weights // ranks, "gradients": gradients // ranks}
    return stats


class Meter:
    """The sums of one balancer since the meter was created; `add` and `capture` subscribe.

    Of captured microbatches, each rank reports an equal share of the bytes of all ranks. The worst
    imbalance starts anew with every fetch.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._host = Stats()
        self.add = self._host.add
        self._devices: dict[torch.device, PlanSums] = {}
        triton = any(info.name == "triton" and info.available for info in BACKENDS)
        if triton and torch.cuda.is_initialized():  # allocate before a graph is captured
            self._sums_on(torch.empty(0, device="cuda").device)

    def capture(self, record: PassRecord) -> None:
        """Count this pass in every replay of the graph that captures it."""
        plan = record.plan
        on_device = self._sums_on(plan.result.device)
        if not record.backward:
            replicas, loads = plan.num_replicas, plan.rank_loads
            on_device.add(replicas, loads, plan.replicas, plan.quotas, plan.speeds)
        for what, nbytes, _ in record.sent:
            on_device.sums[ORDER.index(what)].add_(plan.num_replicas[0], alpha=nbytes)

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
            topology = self._topology
            of_device = PlanSums(sums, topology.home_of_expert, topology.ranks)
            replicas = max(1, topology.ranks * topology.slots)
            shapes = (1,), (topology.ranks,), (replicas, 3), (replicas,)
            # Loads the kernel before a capture.
            of_device.add(*(torch.zeros(n, dtype=torch.int32, device=device) for n in shapes))
            sums.zero_()
            self._devices[device] = of_device
        return self._devices[device]

    def fetch(self) -> Fetched:
        """Start to copy the sums to the host. Does not block."""
        host = Stats()
        host.merge(self._host)
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


@dataclass(frozen=True)
class Reading:
    """Counts up to a step.

    values: figures since the previous reading. Imbalances are means over layers of microbatches,
        `skipped` is the share of them without a replica, copies and bytes are sums, and
        `seconds/STAGE` are means over the timed microbatches. `speed/RANK` is the speed of a rank
        over the median, as measured last; it is missing if speeds are unknown.
    totals: sums since `Metrics` was created; `worst` since the previous reading.
    rank: this rank. Only bytes and seconds differ between ranks.
    """

    step: int
    rank: int
    policy: str
    values: Mapping[str, float]
    totals: Stats


Sink: TypeAlias = Callable[[Reading], None]


class Metrics:
    """Counts plans, bytes and seconds of balancers, and passes readings to sinks.

    Call `step` after every training step.

    balancers: balancers of this rank, all with one policy. Create `Metrics` before you capture a
        graph, so that the graph counts its replays.
    every: steps between two readings.
    """

    def __init__(self, *balancers: Balancer, every: int = 100) -> None:
        if not balancers:
            raise ConfigError("metrics need at least one balancer, got none")
        if every < 1:
            raise ConfigError(f"every must be at least 1, got {every}")
        policies = sorted({balancer.config.policy for balancer in balancers})
        if len(policies) > 1:
            raise ConfigError(
                f"all balancers must have one policy, got {' and '.join(policies)}; create one "
                "Metrics per policy"
            )
        self.policy, self.every, self._steps = policies[0], every, 0
        self._rank = balancers[0].rank
        self._sinks: list[Sink] = []
        self._pending: tuple[int, list[Fetched]] | None = None
        self._previous = Stats()
        self._balancers = balancers
        self._meters = [Meter(balancer.topology) for balancer in balancers]
        for balancer, meter in zip(balancers, self._meters, strict=True):
            balancer.subscribe(meter.add)
            balancer.subscribe(meter.capture, captured=True)

    def tell(self, *sinks: Sink) -> Metrics:
        """Pass every later reading to these sinks, too."""
        self._sinks.extend(sinks)
        return self

    def step(self) -> None:
        """Count a step. Sums of a device may arrive, and be passed on, in a later step."""
        self._steps += 1
        due = self._steps % self.every == 0
        if self._pending is not None and (due or self._arrived()):
            self._publish()
        if due:
            self._fetch()
            if self._arrived():
                self._publish()

    def read(self) -> Reading:
        """Read now and pass the reading to the sinks; waits for the device."""
        if self._pending is not None:
            self._publish()
        for balancer in self._balancers:
            balancer.settle()
        self._fetch()
        return self._publish()

    def _fetch(self) -> None:
        self._pending = self._steps, [meter.fetch() for meter in self._meters]

    def _arrived(self) -> bool:
        return self._pending is not None and all(f.ready() for f in self._pending[1])

    def _publish(self) -> Reading:
        assert self._pending is not None
        (step, fetched), self._pending = self._pending, None
        totals = Stats()
        for part in (part for of_meter in fetched for part in of_meter.parts()):
            totals.merge(part)
        values = values_between(self._previous, totals) | self._speeds()
        self._previous = totals
        reading = Reading(step, self._rank, self.policy, values, totals)
        for sink in self._sinks:
            sink(reading)
        return reading

    def _speeds(self) -> dict[str, float]:
        """Speeds of the ranks of the first balancer that has any."""
        for balancer in self._balancers:
            if speeds := balancer.measured_speeds or balancer.speeds:
                return {f"{SPEED}{rank}": s / NOMINAL_SPEED for rank, s in enumerate(speeds)}
        return {}


def values_between(previous: Stats, totals: Stats) -> dict[str, float]:
    """Figures of the microbatches between two readings."""
    recent = Stats()
    recent.merge(totals)
    recent.merge(previous, sign=-1)
    values = recent.figures() | {"skipped": recent.skipped / max(1, recent.microbatches)}
    if not recent.microbatches:
        values |= dict.fromkeys(("imbalance_before", "imbalance_after", "imbalance_worst"), 1.0)
    if recent.timed:
        for stage, seconds in recent.seconds.items():
            values[f"seconds/{stage}"] = seconds / recent.timed
    return values
