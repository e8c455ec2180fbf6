"""Balancer: one per expert-parallel group; owns communicator, backend and spare slots.

Its verbs are the stages that need the group: `gather` (1), `plan` (2), `replicate` (3), `reroute`
(4), `roads` (5 and 7), and `Replicas.reduce` (8). All ranks call them in the same order. Some
also carry what the ranks must agree on (agreement.py), so that a rank with other weights, or at
another place of the program, is an error that names it, on every rank.

Shapes: T tokens, K experts per token, R ranks, E experts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ultraep.arrays import IntArray
from ultraep.backends import backend_for, select
from ultraep.bundle import Bundle, given_tensors, kinds, resolve
from ultraep.comm import Communicator
from ultraep.config import BalanceConfig
from ultraep.dispatch import Roads
from ultraep.errors import ConfigError, LoadError, SlotError
from ultraep.loads import MAX_TOTAL, count_loads
from ultraep.modes import unseen
from ultraep.plan import Plan
from ultraep.plan import plan as make_plan
from ultraep.policies import get_policy
from ultraep.replicate import MODES
from ultraep.reroute import Routes, reroute, routes_of
from ultraep.runtime.agreement import Agreement, Place, Point, short_digest
from ultraep.runtime.past import Past, in_backward
from ultraep.runtime.recording import Passage, Passages, TimedRoads, open_recorder, wanted
from ultraep.runtime.replicas import Replicas
from ultraep.runtime.slots import SlotPool
from ultraep.runtime.stats import Stats
from ultraep.runtime.unique import Unique
from ultraep.runtime.versions import Versions
from ultraep.topology import Topology
from ultraep.trace.record import Recorder
from ultraep.version import __version__

if TYPE_CHECKING:
    import torch.distributed as dist

    from ultraep.runtime.control import ControlPlane


@dataclass(frozen=True, slots=True)
class Gathered:
    """The loads of all ranks, and the versions of their weights."""

    loads: IntArray  # [R, E]
    versions: IntArray  # [R]
    layer: int
    step: int
    on_device: torch.Tensor  # [R, E] the loads where the ids are
    passage: Passage | None = None  # what is recorded of it


class Balancer(Unique):
    """Balances every microbatch of every layer of one expert-parallel group.

    group: a torch.distributed process group; None: one process is the whole group.
    experts, slots, domain, homes: see `Topology`.
    config or policy: how to balance; `policy` alone is short for `BalanceConfig(policy=...)`.
    backend: "triton", "cpu" or "reference"; None: the best one where the ids are.
    relay: how weights travel, "direct", "chain", or "auto": the faster one for each plan.
    chunks: pieces of an expert in a chain.
    in_flight: buffers of spare slots, for callers that keep several filled at the same time.
    verify: compare the plans of all ranks, and where they are in backward. Without it, only loads
        are compared: a rank that skips a backward pass may stop the others, or go unnoticed.
    transport: "auto", "shared" (memory, CPU ranks of one host) or "sockets" (the group's own).
    timeout: seconds after which a silent rank is an error; None: the group's own (those of
        torch.distributed: 30 minutes with gloo, 10 with NCCL). A rank that died is one at once.
    communicator: in place of a group, for ranks that are no processes (`LocalGroup`).
    record: folder for a trace of every microbatch, on all ranks; None: one inside the folder that
        the environment variable ULTRAEP_TRACE names, or none.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        experts: int,
        slots: int = 1,
        domain: int | None = None,
        homes: Sequence[int] | None = None,
        config: BalanceConfig | None = None,
        policy: str | None = None,
        backend: str | None = None,
        relay: str = "auto",
        chunks: int = 4,
        in_flight: int = 1,
        verify: bool = True,
        transport: str = "auto",
        timeout: float | None = None,
        communicator: Communicator | None = None,
        record: str | Path | None = None,
    ) -> None:
        if config is not None and policy is not None:
            raise ConfigError(f"give config or policy, not both: {config} and {policy!r}")
        self.config = config or BalanceConfig(policy="ultraep" if policy is None else policy)
        if relay not in MODES or chunks < 1:
            raise ConfigError(f"want relay of {', '.join(MODES)}, chunks >= 1: {relay!r}, {chunks}")
        get_policy(self.config.policy)
        select(backend)
        _warm_up(backend)
        self.relay, self.chunks, self.verify = relay, chunks, verify
        self.pool, self.group = SlotPool(slots, in_flight), group
        with ExitStack() as undo:
            self.comm = communicator or undo.enter_context(
                closing(_connect(group, transport, timeout))
            )
            self.topology = Topology(
                ranks=self.comm.size, experts=experts, slots=slots, domain=domain, homes=homes
            )
            agreed = (relay, chunks, in_flight, verify, wanted(record), __version__)
            settings = repr((self.topology, self.config, *agreed))
            self._agreement = Agreement(self.comm, settings, experts)
            self.recorder: Recorder | None = open_recorder(
                record, self.comm, self.topology, self.config
            )
            undo.pop_all()
        self._backend_name = backend
        self._control: ControlPlane | None = None
        self._known_to_control: Plan | None = None
        self._layers = self._steps = 0
        self._versions = Versions()
        self._past = Past()
        self._passages = Passages(self.recorder) if self.recorder is not None else None
        self._stats = Stats()

    @property
    def rank(self) -> int:
        return self.comm.rank

    def register_layer(self) -> int:
        """A number for a layer; layers are made in the same order on all ranks."""
        self._layers += 1
        return self._layers - 1

    @unseen()
    def gather(
        self,
        ids: torch.Tensor,
        *,
        layer: int = 0,
        bundle: Bundle | None = None,
        inputs: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> Gathered:
        """Stage 1: the exact loads of all ranks from the `[T, K]` ids of this one; -1: padding.

        bundle, inputs, weights: what is to be copied, the tokens as they are to be sent, and the
        router's weights; ranks compare of which kind they are and whether they want gradients.
        """
        passage = Passage(self.recorder) if self.recorder is not None else None
        with self.timed("loads", passage):
            self._control = self._control_for(ids)
            loads_E, refused = self._count(ids)
            self._steps += 1
            found = kinds(resolve(bundle or {}), inputs=inputs, weights=weights)
            version = self._versions.of(layer, given_tensors(bundle or {}))
            point = Point.LOADS_AGAIN if in_backward() else Point.LOADS
            records = self._agreement.loads(
                Place(point, layer, self._steps),
                loads_E,
                kinds=found,
                version=version,
                refused=refused,
            )
            if records.column("refused")[self.rank]:
                self._refuse(ids)
            self._agreement.compare_inputs(records, found)
        versions, on_device = records.column("version"), records.loads_on_device
        return Gathered(records.loads, versions, layer, self._steps, on_device, passage)

    @unseen()
    def plan(self, gathered: Gathered, *, policy: str | None = None) -> Plan:
        """Stage 2: the plan of this step; every rank finds the same."""
        passage = gathered.passage
        with self.timed("plan", passage):
            config = self.config if policy is None else replace(self.config, policy=policy)
            seen = self._past.see(gathered.layer, gathered.loads.sum(axis=0))
            if self._control is not None and config == self._control.config:
                plan = self._control.plan(gathered.on_device).to_host(gathered.loads)
                self._known_to_control = plan
            else:
                backend, history = self._backend_name, seen.before
                plan = make_plan(
                    gathered.loads, self.topology, config, backend=backend, history=history
                )
            if not plan.within_limits:
                raise SlotError(
                    f"policy {config.policy!r} needs {plan.max_ingress} spare slots on one rank, "
                    f"there are {self.topology.slots}; copies "
                    f"{'leave' if plan.leaves_domain else 'stay in'} their domain of "
                    f"{self.topology.domain_size} ranks"
                )
            self._stats.planned(plan)
            if passage is not None and self._passages is not None:
                self._passages.planned(passage, gathered.layer, plan, seen)
        if self.verify:
            with self.timed("verify", passage):
                self._agreement.meet(
                    Place(Point.PLAN, gathered.layer, gathered.step),
                    gathered.on_device.device,
                    digest=short_digest(plan.replicas, plan.quotas),
                    told=f"{plan.num_replicas} copies by policy {config.policy!r}",
                )
        return plan

    def replicate(self, plan: Plan, gathered: Gathered, bundle: Bundle) -> Replicas:
        """Stage 3: spare slots filled with weights of `bundle`, for the time of a `with` block."""
        return Replicas(self, plan, gathered, bundle)

    @unseen()
    def reroute(self, ids: torch.Tensor, plan: Plan) -> Routes:
        """Stage 4: a slot for every routed row of this rank."""
        with self.timed("reroute", self._passage_of(plan)):
            if self._control is None:
                return reroute(ids, plan, self.rank, backend=self._backend_name)
            if self._known_to_control is not plan:
                self._control.adopt(plan)
                self._known_to_control = plan
            order = self._control.reroute(ids.contiguous()).order
            if self.verify:
                self._control.check()
            # Where nobody checks, ids of another plan must not lead out of the tokens.
            sent = int(plan.loads[self.rank].sum())
            order = order[:sent].long().clamp_(0, max(0, ids.numel() - 1))
            return routes_of(plan, self.rank, ids.shape, order)

    def roads(self, routes: Routes, gathered: Gathered) -> Roads:
        """The way of stages 5 and 7 between tokens and slots."""

        def on_return() -> None:
            if self.verify:
                place = Place(Point.BACKWARD, gathered.layer, gathered.step)
                self._agreement.meet(place, gathered.on_device.device)

        if gathered.passage is not None:
            return TimedRoads(routes, self.comm, on_return, gathered.passage)
        return Roads(routes, self.comm, on_return)

    def at_state(self, layer: int, device: torch.device) -> None:
        """Before the experts of all ranks are gathered: raise if not all ranks are about to."""
        self._agreement.meet(Place(Point.STATE, layer, self._steps), device)

    def record_step(self, step: int) -> None:
        """Say to which step of training the next microbatches belong, if they are recorded.

        Unless that is said, the microbatches of a layer count as steps.
        """
        if self._passages is not None:
            self._passages.begin_step(step)

    @contextmanager
    def unchanged_weights(self) -> Iterator[None]:
        """Promise that the weights of this rank's home experts do not change in this block.

        Copies that are still there are then not sent again: for serving, and for the microbatches
        between two steps of an optimizer. Without the promise, copies serve the forward and the
        backward pass of one microbatch, since torch does not see every write. Writes that it does
        see, and other tensors than before, are noticed here too. One rank alone may promise.
        """
        with self._versions.unchanged():
            yield

    def weights_changed(self) -> None:
        """Say that weights of this rank have changed in spite of a promise. One rank may."""
        self._versions.changed()

    def stats(self) -> dict[str, Any]:
        """What was planned and moved so far, and the seconds of every stage on this rank.

        A forward pass that is computed again in backward counts twice.
        """
        return self._stats.summary() | {"pool_bytes": self.pool.nbytes}

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._stats = Stats()

    def close(self) -> None:
        """Write the rest of the trace, give back the communicator's resources."""
        if self.recorder is not None:
            self.recorder.close()
        self.comm.close()

    @contextmanager
    def timed(self, stage: str, passage: Passage | None = None) -> Iterator[None]:
        """Add the time of the block to this stage."""
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        self._stats.took(stage, seconds)
        if passage is not None:
            passage.took(stage, seconds)

    def sent(self, what: str, nbytes: int, copies: int, passage: Passage | None = None) -> None:
        """Count what a stage sent."""
        self._stats.sent(what, nbytes, copies)
        if passage is not None:
            passage.moved += nbytes

    def _passage_of(self, plan: Plan) -> Passage | None:
        last = self._passages.last if self._passages is not None else None
        return last if last is not None and last.plan is plan else None

    def _control_for(self, ids: torch.Tensor) -> ControlPlane | None:
        """The kernels for these ids, if they are on a GPU, or if the user asks for them."""
        if (self._backend_name or backend_for(ids.device.type).name) != "triton":
            return None
        control, rows = self._control, ids.numel()
        if control is not None and control.device == ids.device and rows <= control.rows:
            return control
        from ultraep.runtime.control import POLICIES, ControlPlane  # triton, only where it is used

        config = self.config
        if config.policy not in POLICIES:
            config = replace(config, policy="ultraep")
        rows = min(1 << max(rows, 1024).bit_length(), MAX_TOTAL // self.topology.ranks)
        self._known_to_control = None
        return ControlPlane(self.topology, config, rows=rows, rank=self.rank, device=ids.device)

    def _count(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | int]:
        """The loads of this rank, and whether its ids are no good: an error to raise later.

        On the GPU it also counts if something was wrong since the last step.
        """
        try:
            if self._control is not None:
                return self._control.count(ids.contiguous()), self._control.faults.any()
            counts = count_loads(ids, self.topology.experts, backend=self._backend_name)
            return torch.from_numpy(counts).to(ids.device), 0
        except LoadError:
            return torch.zeros(self.topology.experts, dtype=torch.int64, device=ids.device), 1

    def _refuse(self, ids: torch.Tensor) -> None:
        """Raise the error that `_count` has kept."""
        if self._control is not None:
            self._control.check()
            self._control.count(ids.contiguous())
        count_loads(ids, self.topology.experts, backend=self._backend_name)


@cache
def _warm_up(backend: str | None) -> None:
    """Compile what a step needs before the group is joined, so that no rank waits for it then."""
    topology, ids = Topology(ranks=2, experts=2), torch.zeros(2, 1, dtype=torch.int64)
    loads = [count_loads(ids, topology.experts, backend=backend)] * topology.ranks
    plan = make_plan(loads, topology, BalanceConfig(tolerance=0.1), backend=backend)
    reroute(ids, plan, 0, backend=backend)


def _connect(
    group: dist.ProcessGroup | None, transport: str, timeout: float | None
) -> Communicator:
    from ultraep.runtime.connect import connect  # torch.distributed, only where it is needed

    return connect(group, transport=transport, timeout=timeout)
