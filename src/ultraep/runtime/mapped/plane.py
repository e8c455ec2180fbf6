"""The data plane of mapped memory: loads, routes, rows and weights stay on the GPUs of a group.

The GPUs map each other's memory. Outside of graphs, the host reads the plan once per layer, with
the positions, tokens and faults of all ranks: one small copy to pinned memory. So all tensors have
exact lengths, memory follows the rows, and ranks that differ are named. A rank alone does not wait.
A captured graph keeps the memory that was allocated before: run one step before the capture.

Shapes: T tokens, K experts per token, R ranks, E experts, C replicas, D model width.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from ultraep.bundle import Bundle, resolve, signature
from ultraep.comm import Peers
from ultraep.config import AUTO, BalanceConfig
from ultraep.dispatch import Exchange
from ultraep.errors import CommunicationError, ConfigError, LoadError
from ultraep.inputs import NO_LAYER, Inputs
from ultraep.loads import invalid_ids
from ultraep.microbatch import Context, Microbatch
from ultraep.ops.modes import outside_dispatch_modes
from ultraep.passes import Passes
from ultraep.plan import Plan
from ultraep.plan import plan as make_plan
from ultraep.position import At, Position, compare_positions, compare_values
from ultraep.runtime.device_plan import DevicePlan, Gathered
from ultraep.runtime.device_planner import DevicePlanner, device_config
from ultraep.runtime.mapped.memory import MappedMemory
from ultraep.runtime.mapped.replicas import MappedReplicas
from ultraep.runtime.mapped.rows import MappedRows, OwnRows
from ultraep.runtime.streams import Fetch, capturing

FIRST_ROWS = 1024  # routed rows that the planner has room for at first
SPIN, PAUSE = 0.002, 0.0001  # seconds: ask without a pause; then a pause between two questions
SPARE = 4  # one in this many rows is spare, so that memory seldom grows
PATIENCE = 5.0  # seconds after which a rank asks whether the others are alive


class MappedPlane:
    """One rank of a group of GPUs that map each other's memory; see `DataPlane`."""

    name = "mapped"

    @torch.inference_mode(False)
    def __init__(self, context: Context, peers: Peers) -> None:
        _check_current(peers.device)
        self.context, self.topology, self.device = context, context.topology, peers.device
        self._peers, self.hosts = peers, context.comm.hosts()
        # A rank alone serves its own rows: it need not know how many of them are padding.
        self.alone = context.topology.ranks == 1 and context.settings.capacity == AUTO
        self.planner = DevicePlanner(
            context.topology,
            device_config(context.config),
            rows=FIRST_ROWS,
            rank=context.comm.rank,
            alone=self.alone,
            device=peers.device,
        )
        self.memory = MappedMemory(
            peers,
            context,
            numbers=self.planner.counts.numel(),
            positions=self.planner.positions,
        )
        self.counted: Passes | None = None  # whose ids and loads the device holds
        self.rows_of_layer: dict[int, int] = {}  # of all ranks, for the choice of rates
        # Layers whose first microbatch has replicated, with or without replicas, so that the
        # capture of a graph finds all memory allocated and all kernels loaded.
        self.replicated: set[int] = set()
        self._kept: list[object] = []
        self._fetch: Fetch | None = None  # of faults, on its way to the host

    def begin(self, inputs: Inputs) -> MappedMicrobatch:
        return MappedMicrobatch(self, inputs)

    def reserve(self, rows: int) -> None:
        """Provide buffers for this many routed rows of this rank."""
        if rows <= self.planner.rows:
            return
        if capturing(self.device):
            raise _cannot_grow(f"{rows} routed rows", self.planner.rows)
        with torch.inference_mode(False):
            self.planner.reserve(1 << (rows - 1).bit_length())

    def keep(self) -> None:
        """Never free the present memory: a graph uses it."""
        self.memory.keep()
        self._kept.append(self.planner.buffers)

    def poll(self) -> None:
        """Raise faults of earlier microbatches that have reached the host; does not wait."""
        if self._fetch is not None and not self._fetch.here():
            return
        fetch, self._fetch = self._fetch, None
        if fetch is not None and fetch.wait().any():
            self.check()
        self._fetch = Fetch(self.planner.faults)

    def pause(self, event: torch.cuda.Event, work: Callable[[], bool]) -> None:
        """Wait for the device; raise if a rank that it waits for is dead.

        work: does some of the host's work meanwhile; returns whether there was any.
        """
        begin = asked = time.monotonic()
        while not event.query():
            if work():
                continue
            now = time.monotonic()
            if now - begin > SPIN:
                time.sleep(PAUSE)
            if now - asked > PATIENCE:
                self.hosts.check_alive()
                asked = time.monotonic()

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def check(self) -> None:
        try:
            self.memory.check()
            self.planner.check()
        except CommunicationError as error:
            self._ask_hosts(error)
            raise

    def _ask_hosts(self, error: CommunicationError) -> None:
        """Raise with what the hosts know: a rank that is late may have waited for another."""
        try:
            self.hosts.check_alive()
        except CommunicationError as cause:
            ranks = *error.ranks, *cause.ranks
            raise CommunicationError(f"{error}; {cause}", ranks=ranks, place=error.place) from error

    def close(self) -> None:
        self._peers.close()
        if self.hosts is not self.context.comm:
            self.hosts.close()


class MappedMicrobatch(Microbatch):
    """One microbatch of one rank, on its device.

    All microbatches use the same buffers for loads and plan. So stages 1, 2 and 4 of one microbatch
    run before the next one is counted.
    """

    _signature: str  # of weights and inputs, from `count`

    def __init__(self, plane: MappedPlane, inputs: Inputs) -> None:
        super().__init__(inputs, plane.context)
        self._plane = plane
        self._captured = capturing(plane.device)
        self._waits = not (plane.alone or self._captured)
        self._refusal: LoadError | None = None
        self._begins: list[int] | None = None  # of the slots of this rank, once the host knows
        self._loads: torch.Tensor | None = None
        self._plan: DevicePlan | None = None
        self._last_replicas: MappedReplicas | None = None

    @outside_dispatch_modes
    def count(self) -> torch.Tensor:
        self._record.at("loads")
        plane, inputs, ids = self._plane, self._inputs, self._inputs.ids
        planner, memory = plane.planner, plane.memory
        self._refusal = invalid_ids(ids)
        if self._captured:
            self._check_capture()
        elif not self._waits:
            if self._record.timed:
                plane.poll()
            if self._refusal is not None:
                raise self._refusal
        if self._refusal is None:
            plane.reserve(ids.numel())
            planner.count(ids.contiguous())
        else:
            planner.refuse()
        plane.counted = self.passes
        if plane.topology.ranks > 1:
            own = self._signature = signature(
                resolve(inputs.layer.bundle), rows=inputs.tokens, gates=inputs.gates
            )
            memory.position = *self.passes.position(At.LOADS).words, zlib.crc32(own.encode()) >> 1
            memory.share_loads(planner.counts, planner.gathered, compared=self._waits)
        self._loads = planner.loads
        return planner.loads

    def _check_capture(self) -> None:
        """Raise if a graph cannot capture this microbatch; otherwise keep its memory."""
        memory, ids = self._plane.memory, self._inputs.ids
        if self._refusal is not None:
            raise self._refusal
        if len(ids) > memory.tokens:
            raise _cannot_grow(f"{len(ids)} tokens", memory.tokens)
        self._plane.keep()

    def _rows_of_all(self) -> int:
        """As they were when the layer was first planned: a recomputed plan must be the same.

        The hosts compare that first microbatch themselves, before they measure rates together.
        """
        plane, layer = self._plane, self.passes.layer
        rows = plane.rows_of_layer.get(layer, 0)
        if rows or not plane.topology.can_replicate:
            return rows
        rows = 0 if self._refusal is not None else self._inputs.ids.numel()
        if not self._captured:
            own = self._signature, rows, self._refusal is not None
            gathered = plane.hosts.gather_objects(own)
            signatures, every, refusals = zip(*gathered, strict=True)
            self._compare_signatures(signatures)
            self._raise_refusals([rank for rank, refuses in enumerate(refusals) if refuses])
            rows = max(every)
        plane.rows_of_layer[layer] = rows * plane.topology.ranks
        return plane.rows_of_layer[layer]

    def _compare_signatures(self, signatures: Sequence[str]) -> None:
        place = self.passes.position(At.LOADS)
        compare_values(f"the weights or inputs at {place}", signatures, signatures, place)

    def _raise_refusals(self, refused: list[int]) -> None:
        """Raise if there are such ranks: the error of this rank, or one that names the others."""
        if not refused:
            return
        planner = self._plane.planner
        if self._refusal is not None:
            planner.faults.zero_()
            raise self._refusal
        planner.check()
        raise CommunicationError(
            f"ranks {refused} refused their input; their errors say why", ranks=refused
        )

    def _current(self) -> DevicePlanner:
        """Return the planner if its buffers still hold this microbatch."""
        counted = self._plane.counted
        if counted is not self.passes:
            raise ConfigError(
                f"microbatch {self.passes.count} cannot be planned or rerouted after microbatch "
                f"{counted.count if counted else '?'} was counted: on a GPU, call count, plan and "
                "reroute of one microbatch before count of the next"
            )
        return self._plane.planner

    @outside_dispatch_modes
    def plan(self) -> DevicePlan:
        self._after("count", self._loads)
        record = self._record
        config = self._context.cost.config(self._inputs, self._rows_of_all(), self._trial)
        record.at("plan")
        plan = self._plan = self.passes.plan = record.plan = self._planned(config)
        record.at("verify")
        if self._inputs.tokens is None:  # the caller dispatches rows
            record.at("")
        return plan

    def _planned(self, config: BalanceConfig) -> DevicePlan:
        """Return the plan; unless a graph is captured, ranks agree and have memory for it."""
        planner = self._current()
        on_device = planner.use(config)
        if self._captured and not on_device:
            raise ConfigError(
                f"policy {config.policy!r} plans on the host and cannot be captured in a graph; "
                f"the device plans {planner.config.policy!r}"
            )
        if on_device and not self._waits:
            ids, memory = self._inputs.ids, self._plane.memory
            if not self._captured:
                memory.fit(len(ids), ids.numel())
            plan = planner.plan(planner.loads)
            return plan if self._plane.alone else plan.copied()
        planner.plan(planner.loads)
        gathered, plan = planner.read(self._pause)
        self._compare(gathered)
        if not on_device:
            host_plan = make_plan(plan.to_host().loads, self._plane.topology, config)
            planner.adopt(host_plan)
            gathered, plan = planner.read(self._pause)
        self._settle(gathered, plan)
        return plan

    def _pause(self, event: torch.cuda.Event) -> None:
        self._plane.pause(event, self.passes.deliver)

    def _compare(self, gathered: Gathered) -> None:
        """Raise if ranks differ, if one is lost, or if one refuses its input."""
        *words, (fault, _, _) = gathered.positions.tolist()
        if fault:
            self._plane.check()
        place = self.passes.position(At.LOADS)
        if len(words) > 1 and words.count(words[0]) < len(words):
            compare_positions([Position.from_words(*position) for *position, _ in words], place)
            self._compare_signatures(self._plane.hosts.gather_objects(self._signature))
        self._raise_refusals(gathered.refused())

    def _settle(self, gathered: Gathered, plan: DevicePlan) -> None:
        """Provide memory for the rows of the plan, the same on all ranks."""
        settings, memory = self._context.settings, self._plane.memory
        rows = planned = plan.most_rows()
        if settings.capacity != AUTO:
            settings.check_rows(plan.to_host())
            rows = int(settings.capacity)
        elif planned > memory.rows:
            rows += planned // SPARE
        memory.fit(gathered.tokens(self._inputs.ids.shape[1]), rows)
        self._begins = [0, *accumulate(gathered.received.sum(axis=0).tolist())]

    def replicate(self) -> MappedReplicas:
        plan, layers = self._after("plan", self._plan), self._plane.replicated
        possible, table = plan.topology.can_replicate, plan.replicas
        if plan.fetched is not None and self.passes.layer in layers:
            possible = plan.has_replicas()
        layers.add(self.passes.layer)
        if possible and not self._captured:
            table = table.clone()  # the next plan overwrites it
        memory, bundle = self._plane.memory, self._inputs.layer.bundle
        replicas = self._last_replicas = MappedReplicas(
            self._context, memory, self.passes, table, bundle, possible=possible
        )
        return replicas

    def _trial(self, plan: Plan, bundle: Bundle) -> MappedReplicas:
        """Return the replicas of a synthetic plan, to be timed."""
        passes = Passes(NO_LAYER, self.passes.step, count=self.passes.count)
        table = self._plane.planner.adopt(plan).copied().replicas
        return MappedReplicas(self._context, self._plane.memory, passes, table, bundle)

    @outside_dispatch_modes
    def reroute(self) -> Exchange:
        self._record.at("reroute")
        plan, memory, ids = self._after("plan", self._plan), self._plane.memory, self._inputs.ids
        planner, ids = self._current(), ids.contiguous()
        if self._plane.alone:
            slots, *order = planner.reroute_alone(ids)
            own = OwnRows(self.passes, memory, slots, self._last_replicas, *order)
            return self._rerouted(own)
        rows = MappedRows(
            self.passes,
            memory,
            planner.reroute(ids, counted=True),
            plan.rank_loads,
            self._last_replicas,
            self._begins,
            memory.rows if self._captured else ids.numel(),
        )
        return self._rerouted(rows)


def _cannot_grow(needed: str, room: int) -> LoadError:
    """Return the error of a graph that needs more memory than there is."""
    return LoadError(
        f"{needed}, but there is memory for {room}, and it cannot grow in a graph: run such a step "
        "before the capture"
    )


def _check_current(device: torch.device) -> None:
    """Raise if kernels would be launched on another device than this one."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ConfigError(
            f"the memory is on {device}, the current device is cuda:{torch.cuda.current_device()}: "
            "call torch.cuda.set_device first"
        )
