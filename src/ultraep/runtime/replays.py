"""ReplayedPlans: adds the microbatches of replayed graphs to the trace.

A replay runs no Python. So a kernel after the planner stores every plan with its step in a ring on
the device, and a graph captures this kernel with the rest. The host fetches from the ring without
waiting: first the number of plans, later the new ones. Plans that were overwritten before they were
fetched count as dropped. The seconds of stages are unknown.

Shapes: R ranks, E experts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ultraep.passes import FORWARD, Passes, PassRecord
from ultraep.runtime.device_plan import DevicePlan
from ultraep.runtime.recording import Recording
from ultraep.runtime.streams import Fetch
from ultraep.topology import Topology

MEMORY = 64 << 20  # bytes of plans on a device
FEWEST, MOST = 64, 4096  # plans in the ring
NO_STEP = -1
LAUNCHES = 64  # steps whose launch time is remembered


@dataclass
class _Site:
    """One captured microbatch."""

    layer: int
    plan: DevicePlan  # without its tensors
    sent: list[tuple[str, int]] = field(default_factory=list)  # what, bytes per replica


@dataclass(frozen=True)
class _New:
    """Plans that are being copied to the host, and how many were stored after the copy."""

    first: int
    plans: list[Fetch]
    kept: Fetch


class ReplayedPlans:
    """The plans of captured microbatches of one rank, on one device."""

    @torch.inference_mode(False)  # so that training can write the ring, too
    def __init__(self, recording: Recording, topology: Topology, device: torch.device) -> None:
        from ultraep.backends.triton.history import PlanRing  # imports triton

        ranks, replicas = topology.ranks, max(1, topology.ranks * topology.slots)
        self._loads = ranks * topology.experts
        numbers = self._loads + ranks + replicas * (5 + ranks) + 4 * 6  # each padded to four
        places = min(MOST, max(FEWEST, MEMORY // (4 * numbers)))
        self.ring = PlanRing(places, numbers, device)
        self.ring.state[1].fill_(NO_STEP)
        self._recording, self._shape = recording, (ranks, topology.experts)
        self._sites: list[_Site] = []
        self._of: WeakKeyDictionary[Passes, _Site] = WeakKeyDictionary()
        self._fetched = 0
        self._kept: Fetch | None = None
        self._new: _New | None = None
        self._launched: dict[int, float] = {}

    def captured(self, record: PassRecord) -> None:
        """Store the plan of this microbatch in every replay, unless it is a recomputation."""
        assert record.passes is not None
        plan: DevicePlan = record.plan
        if record.kind == FORWARD and plan.result.device == self.ring.state.device:
            self.ring.keep(len(self._sites), plan.loads, plan.result)
            nothing = plan.result.new_empty(0)  # do not keep the memory of the graph alive
            light = replace(plan, loads=nothing, expert_of_slot=nothing, result=nothing)
            self._sites.append(_Site(record.layer, light))
            self._of[record.passes] = self._sites[-1]
        if record.passes in self._of:
            sent = ((what, nbytes) for what, nbytes, _ in record.sent)
            self._of[record.passes].sent.extend(sent)

    def begin_step(self, step: int) -> None:
        """Set the step of the following replays, in the order of the current stream."""
        self.ring.state[1].fill_(step)
        self._launched[step] = time.time()
        if len(self._launched) > LAUNCHES:
            del self._launched[next(iter(self._launched))]

    def fetch(self) -> None:
        """Record the plans that have arrived; does not wait."""
        if not self._sites:
            return
        if self._new is not None and self._new.kept.here():
            self._record()
        if self._new is None and self._kept is not None and self._kept.here():
            self._copy_new()
        if self._kept is None:
            self._kept = Fetch(self.ring.state)

    def finish(self) -> None:
        """Record all replays so far; waits for the device."""
        if not self._sites:
            return
        if self.ring.state.device.type == "cuda":
            torch.cuda.synchronize(self.ring.state.device)
        if self._new is not None:
            self._record()
        self._kept = Fetch(self.ring.state)
        self._copy_new()
        if self._new is not None:
            self._record()

    def _copy_new(self) -> None:
        """Start copying the plans that were stored since the last time."""
        assert self._kept is not None
        kept, places = int(self._kept.wait()[0]), len(self.ring.plans)
        self._kept = None
        first = max(self._fetched, kept - places)
        if first == kept:
            return
        begin, end = first % places, (kept - 1) % places + 1
        spans = [(begin, end)] if begin < end else [(begin, places), (0, end)]
        plans = [Fetch(self.ring.plans[slice(*span)]) for span in spans]
        self._recording.lost(first - self._fetched)
        self._fetched = kept
        self._new = _New(first, plans, Fetch(self.ring.state))

    def _record(self) -> None:
        """Record the plans that have arrived."""
        assert self._new is not None
        new, self._new = self._new, None
        rows = torch.cat([part.wait() for part in new.plans]).numpy()
        overwritten = max(0, int(new.kept.wait()[0]) - len(self.ring.plans) - new.first)
        self._recording.lost(min(overwritten, len(rows)))
        for row in rows[overwritten:]:
            self._record_one(row)

    def _record_one(self, row: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        (number, step), numbers = row[:2].tolist(), row[2:]
        request = self._sites[number]
        loads = numbers[: self._loads].reshape(self._shape).astype(np.int64)
        plan = request.plan.to_host(loads, torch.from_numpy(numbers[self._loads :]))
        began = self._launched.get(step, time.time())
        known_step = None if step == NO_STEP else step
        self._recording.replayed(request.layer, known_step, plan, request.sent, began)
