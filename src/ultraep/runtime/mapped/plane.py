"""MappedPlane: the stages of a balancer, and no host between them.

Loads, plan, routes, rows and weights stay on the GPUs of a group that map each other's memory.
Every verb launches the same kernels whatever the loads are, so a whole layer, forward and backward,
can be captured in a CUDA graph and replayed. Run one step before, or `prepare`, so that memory is
there. Outside of graphs the hosts also tell each other where they are and how many tokens they
have, without waiting for their GPUs: so memory grows, and a rank that strays is named.

Shapes: T tokens, K experts per token, R ranks, E experts.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from ultraep.backends.triton.board import AS_PROMISED, Told
from ultraep.bundle import Bundle, resolve, signature
from ultraep.comm import Communicator, Peers
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError, LoadError
from ultraep.plan import Plan
from ultraep.plan import plan as make_plan
from ultraep.plane import NO_LAYER, Microbatch
from ultraep.runtime.agreement import Agreement, Place, Point
from ultraep.runtime.backward import LentInBackward
from ultraep.runtime.capacity import Capacity
from ultraep.runtime.control import POLICIES, DevicePlan
from ultraep.runtime.history import History
from ultraep.runtime.mapped.copies import MappedCopies
from ultraep.runtime.mapped.exchange import MappedExchange
from ultraep.runtime.mapped.overlap import capturing
from ultraep.runtime.mapped.room import Room
from ultraep.runtime.observe import Watch
from ultraep.runtime.settings import Settings
from ultraep.runtime.versions import Versions
from ultraep.topology import Topology


@dataclass(frozen=True, slots=True)
class DeviceLoads:
    """The loads of all ranks, on the device."""

    microbatch: Microbatch
    on_device: torch.Tensor  # [R, E]
    ids: torch.Tensor  # those of this rank that were counted
    room: Room
    turn: int  # of the microbatch on this plane
    about_rows: int  # of all ranks, if each had as many tokens as that with the most
    versions: torch.Tensor  # [R] of the weights of all ranks


class MappedPlane:
    """One rank of a group of GPUs that map each other's memory."""

    name = "mapped"

    def __init__(
        self,
        peers: Peers,
        *,
        comm: Communicator,
        agreed: str,
        agreement: Agreement,
        topology: Topology,
        config: BalanceConfig,
        settings: Settings,
        versions: Versions,
        watch: Watch,
    ) -> None:
        _check_current(peers.device)
        self.topology, self.settings, self.watch = topology, settings, watch
        self.lent: MappedCopies | None = None  # copies whose `with` block is open
        self._peers, self._config, self._versions = peers, config, versions
        with torch.inference_mode(False):
            self._promise = torch.zeros(1, dtype=torch.int32, device=peers.device)
        self.promise()
        self._comm, self._hosts = comm, comm.hosts()
        self._agreement: Agreement | None = agreement
        if self._hosts is not comm:
            self._agreement = (
                None if self._hosts is None else Agreement(self._hosts, agreed, topology.experts)
            )
        self._timeout = settings.timeout or comm.timeout
        self._rooms: list[Room] = []
        self._turn = 0
        self._capacity = Capacity(settings.capacity, topology, config)
        self._seen = 0  # the most rows that a rank was planned to serve, as far as all know
        self._history = History()
        self.in_backward = LentInBackward()
        self._adopted: DevicePlan | None = None
        self._kept: torch.Tensor | None = None  # schedule of copies that stay

    def gather(
        self, ids: torch.Tensor, microbatch: Microbatch, bundle: Bundle, **rows: Any
    ) -> DeviceLoads:
        """Stage 1."""
        told = signature(resolve(bundle), **rows)
        room, most = self._room_for(ids, microbatch, told)
        room.look()
        self._turn += 1
        kind = zlib.crc32(f"layer {microbatch.layer}: {told}".encode()) >> 1
        counts, weights = room.control.count(ids.contiguous()), self._told(microbatch.layer, bundle)
        loads = room.memory.share_loads(counts, kind, weights)
        about = most * ids.shape[1] * self.topology.ranks
        return DeviceLoads(microbatch, loads, ids, room, self._turn, about, weights.versions)

    def _told(self, layer: int, bundle: Bundle) -> Told:
        """Whether these weights are promised to be what they were; in graphs, the device knows."""
        versions = torch.empty(self._peers.size, dtype=torch.int32, device=self._peers.device)
        if capturing(self._peers.device):
            return Told(AS_PROMISED, self._promise, versions)
        number = self._versions.of(layer, bundle)
        return Told(even(number) if self._versions.promise else 0, self._promise, versions)

    @property
    def promised(self) -> bool:
        """Whether this rank promises that its weights stay."""
        return self._versions.promise > 0

    def _nothing_promised(self) -> torch.Tensor:
        """[R] versions with which everything is sent."""
        return torch.zeros(self._peers.size, dtype=torch.int32, device=self._peers.device)

    def promise(self) -> None:
        """Tell the device whether the weights of this rank are promised to stay, from here on."""
        if not capturing(self._peers.device):
            number = self._versions.promise
            self._promise.fill_(even(number) + 1 if number else 0)

    def plan(self, loads: DeviceLoads, config: BalanceConfig) -> DevicePlan:
        """Stage 2."""
        self._check_turn(loads)
        control = loads.room.control
        if self._adopted is not None:
            return self._adopted
        if control.use(config):
            return control.plan(loads.on_device).kept()
        if capturing(self._peers.device):
            raise ConfigError(
                f"policy {config.policy!r} plans on the host and cannot be captured in a graph; "
                f"the device plans {control.config.policy!r}"
            )
        numbers = loads.on_device.cpu().numpy().astype("int64")
        past = self._history.note(loads.microbatch, numbers.sum(axis=0)).before
        plan = make_plan(numbers, self.topology, config, history=past)
        plan.check_limits()
        self._capacity.check(plan)
        return control.adopt(plan).kept()

    def verify(self, _plan: DevicePlan, _loads: DeviceLoads) -> None:
        """Nothing: plans are made of what all ranks have compared."""

    def replicate(self, plan: DevicePlan, loads: DeviceLoads, bundle: Bundle) -> MappedCopies:
        """Stage 3."""
        memory, microbatch = loads.room.memory, loads.microbatch
        return MappedCopies(self, memory, plan, microbatch, bundle, loads.versions, self._kept)

    def trial(self, plan: Plan, loads: DeviceLoads, bundle: Bundle, _number: int) -> MappedCopies:
        """Copies of a plan that is made up, to be timed."""
        microbatch = Microbatch(NO_LAYER, loads.microbatch.step, again=False, back=True)
        adopted = loads.room.control.adopt(plan).kept()
        never_kept = torch.zeros_like(loads.versions)
        memory = loads.room.memory
        return MappedCopies(self, memory, adopted, microbatch, bundle, never_kept)

    def reroute(self, ids: torch.Tensor, plan: DevicePlan, loads: DeviceLoads) -> MappedExchange:
        """Stage 4."""
        assert plan.topology == self.topology
        self._check_turn(loads)
        microbatch, copies = loads.microbatch, self.lent
        routes = loads.room.control.reroute(ids.contiguous(), counted=ids is loads.ids)

        def on_return() -> None:
            self._meet(Place(Point.BACKWARD, microbatch.layer, microbatch.step))
            if copies is not None:
                copies.begin()

        return MappedExchange(loads.room.memory, routes, on_return)

    def prepare(self, ids: torch.Tensor, rows: torch.Tensor, bundle: Bundle) -> None:
        """Take all memory that microbatches like this need; otherwise the first one does."""
        tokens, top_k = ids.shape
        room = self._fitting(tokens, top_k) or self._make_room(tokens, top_k)
        room.prepare(resolve(bundle), rows)

    def adopt(self, plan: Plan | None) -> None:
        """Use this plan, made by any policy, for all microbatches to come; None: plan again.

        It must be a plan for their loads: a replayed graph uses what was adopted last.
        """
        self._adopted = None if plan is None else self._rooms[-1].control.adopt(plan)
        self._kept = None

    def keep(self, bundle: Bundle) -> None:
        """Send the copies of the adopted plan once: they stay while nothing else fills the slots.

        For weights that do not change, and one layer: nobody looks whether they have changed.
        """
        if self._adopted is None:
            raise ConfigError("nothing is adopted whose copies could be kept")
        memory, microbatch = self._rooms[-1].memory, Microbatch(0, 0, again=False, back=True)
        promised = self._nothing_promised()
        copies = MappedCopies(self, memory, self._adopted, microbatch, bundle, promised)
        with copies:
            copies.tensors()
        self._kept = copies.schedule

    @property
    def nbytes(self) -> int:
        """Shared memory of this rank."""
        return sum(room.memory.nbytes for room in self._rooms)

    def check(self) -> None:
        """Raise what the device has noted since the last check; waits for it."""
        for room in self._rooms:
            room.check()

    def close(self) -> None:
        """Give back the shared memory; the process group stays."""
        self._rooms.clear()
        self._peers.close()
        if self._hosts is not None and self._hosts is not self._comm:
            self._hosts.close()

    def _room_for(self, ids: torch.Tensor, microbatch: Microbatch, told: str) -> tuple[Room, int]:
        """Memory with room for the tokens of all ranks, made or enlarged if there is none.

        And the most tokens of a rank, if ranks have told each other; else those that all have room
        for, since rates depend on this number, and plans on rates: it must be that of all ranks.
        """
        error = _refused(ids)
        tokens, top_k = (0, 0) if error else ids.shape
        room = self._fitting(tokens, top_k)
        asks = self._comm.size > 1 and (self.settings.verify or not self._rooms)
        if self._agreement is None or not asks or capturing(self._peers.device):
            if error:
                raise error
            room = room or self._make_room_alone(tokens, top_k)
            return room, room.memory.tokens
        place = Place(Point.LOADS_AGAIN if microbatch.again else Point.LOADS, *_where(microbatch))
        records = self._agreement.loads(
            place,
            torch.zeros(self.topology.experts, dtype=torch.int64),
            told=told,
            version=0,
            refused=int(error is not None),
            tokens=tokens,
            rows=max((room.seen for room in self._rooms), default=0),
        )
        if error:
            raise error
        self._agreement.compare_inputs(records, told)
        most, self._seen = (int(records.column(name).max()) for name in ("tokens", "rows"))
        return self._fitting(most, top_k) or self._make_room(most, top_k), most

    def _fitting(self, tokens: int, top_k: int) -> Room | None:
        fitting = (room for room in reversed(self._rooms) if room.fits(tokens, top_k))
        enough = (r for r in fitting if self._capacity.suffices(r.memory.capacity, self._seen))
        return next(enough, None)

    def _make_room_alone(self, tokens: int, top_k: int) -> Room:
        """The first memory, or any of a single rank: others would have to ask each other."""
        others = self._comm.size > 1 and self._rooms
        if capturing(self._peers.device) or others:
            has = ", ".join(f"{r.memory.tokens} x {r.memory.top_k}" for r in self._rooms)
            raise LoadError(
                f"{tokens} tokens x {top_k} choices, but there is memory for {has or 'none'}, and "
                "it cannot grow here: run such a step before, outside of a graph, or give tokens="
            )
        return self._make_room(tokens, top_k)

    @torch.inference_mode(False)
    def _make_room(self, tokens: int, top_k: int) -> Room:
        """Memory for so many tokens, by all ranks; microbatches under way keep theirs."""
        tokens = max(1, tokens, self.settings.tokens or 1)
        largest = max((r.memory.tokens for r in self._rooms if r.memory.top_k == top_k), default=0)
        if self._rooms and tokens > largest:  # and somewhat more: it would be asked for again
            largest = 1 << (tokens - 1).bit_length()
        tokens = max(tokens, largest)
        config = self._config
        if config.policy not in POLICIES:
            config = replace(config, policy="ultraep")
        name, settings = f"room {len(self._rooms)}", self.settings
        rows = self._capacity.rows_for(tokens * top_k, self._seen)
        room = Room.of(
            self._peers, self.topology, config, settings, name, tokens, top_k, rows, self._timeout
        )
        self._rooms.append(room)
        return room

    def _meet(self, place: Place) -> None:
        """Hosts compare where they are, unless a graph is captured."""
        if self._agreement is None or not self.settings.verify or capturing(self._peers.device):
            return
        self._agreement.meet(place, torch.device("cpu"))

    def _check_turn(self, loads: DeviceLoads) -> None:
        if loads.turn != self._turn:
            raise ConfigError(
                f"microbatch {loads.turn} is to be planned or rerouted, but {self._turn} was "
                "gathered since: on a device, stages 1, 2 and 4 of a microbatch follow each other"
            )


def even(number: int) -> int:
    """A version of 32 bits for a number of the host; promises of the device have odd ones."""
    return 2 * (number % 2**30)


def _where(microbatch: Microbatch) -> tuple[int, int]:
    return microbatch.layer, microbatch.step


def _refused(ids: torch.Tensor) -> LoadError | None:
    """What is wrong with ids at first sight."""
    if ids.ndim != 2:
        return LoadError(f"ids must be [tokens, choices], got {list(ids.shape)}")
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        return LoadError(f"ids must be integers, got {ids.dtype}")
    return None


def _check_current(device: torch.device) -> None:
    """Kernels are launched on the current device."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ConfigError(
            f"the memory is on {device}, the current device is cuda:{torch.cuda.current_device()}: "
            "call torch.cuda.set_device first"
        )
