"""DeviceBalancer: the stages of `Balancer`, and no host between them.

Loads, plan, routes, rows and weights stay on the GPUs of a group that map each other's memory.
Every verb launches the same kernels whatever the loads are, so a whole layer, forward and backward,
can be captured in a CUDA graph and replayed. Run one step before, so that memory is there.

Shapes: T tokens, K experts per token, R ranks, E experts, A rows that there is room for, L spare
slots, P parameters of an expert, D model width.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ultraep.bundle import Bundle, Layout, kinds, resolve
from ultraep.comm import Communicator, Peers
from ultraep.config import BalanceConfig, check_timeout
from ultraep.errors import ConfigError, LoadError, PlanMismatch
from ultraep.modes import unseen
from ultraep.plan import Plan
from ultraep.replicate import MODES
from ultraep.runtime.connect import connect
from ultraep.runtime.control import ControlPlane, DevicePlan, DeviceRoutes
from ultraep.runtime.data import DataPlane
from ultraep.runtime.device_replicas import DeviceReplicas
from ultraep.runtime.device_roads import DeviceRoads
from ultraep.runtime.unique import Unique
from ultraep.topology import Topology
from ultraep.version import __version__


@dataclass(slots=True)
class DeviceGathered:
    """The loads of all ranks, on the device, and what becomes of them."""

    loads: torch.Tensor  # [R, E]
    layer: int
    replicas: DeviceReplicas | None = None


class DeviceBalancer(Unique):
    """Balances every microbatch of every layer of one group of GPUs that map each other's memory.

    peers: `SymmetricPeers` of a process group, or one rank of `LocalPeers`.
    tokens, top_k: the most tokens that a rank has in a microbatch, and the choices of each.
    experts, slots, domain, homes: see `Topology`.
    config or policy: as for `Balancer`; the policies "ultraep" and "none".
    capacity: rows that a rank can serve in a microbatch; None: twice the rows it can have itself.
    relay: "auto", "direct" or "chain", how weights travel.
    in_flight: buffers of spare slots, for callers that keep several filled at the same time.
    timeout: seconds after which a rank that does not come is an error on all ranks.
    sms: multiprocessors of this rank; None: all.   budget: those of them that move weights.
    streams: for weights and gradients; None: new ones.
    """

    def __init__(
        self,
        peers: Peers,
        *,
        experts: int,
        tokens: int,
        top_k: int,
        slots: int = 1,
        domain: int | None = None,
        homes: Sequence[int] | None = None,
        config: BalanceConfig | None = None,
        policy: str | None = None,
        capacity: int | None = None,
        relay: str = "auto",
        in_flight: int = 1,
        timeout: float = 30.0,
        sms: int | None = None,
        budget: int | None = None,
        streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None,
    ) -> None:
        if config is not None and policy is not None:
            raise ConfigError(f"give config or policy, not both: {config} and {policy!r}")
        self.config = config or BalanceConfig(policy="ultraep" if policy is None else policy)
        if relay not in MODES:
            raise ConfigError(f"unknown relay mode {relay!r}; known are {', '.join(MODES)}")
        capacity = 2 * tokens * top_k if capacity is None else capacity
        _check_positive(tokens=tokens, top_k=top_k, capacity=capacity, in_flight=in_flight)
        check_timeout(timeout)
        _check_current(peers.device)
        self.tokens, self.top_k = tokens, top_k
        self.topology = Topology(
            ranks=peers.size, experts=experts, slots=slots, domain=domain, homes=homes
        )
        self.rank, self.group = peers.rank, getattr(peers, "group", None)
        settings = repr(
            (self.topology, self.config, tokens, top_k, capacity, relay, in_flight, __version__)
        )
        _agree("settings", peers.gather_objects(settings))
        self.control = ControlPlane(
            self.topology, self.config, rows=tokens * top_k, rank=peers.rank, device=peers.device
        )
        self.data = DataPlane(
            peers,
            self.topology,
            tokens=tokens,
            top_k=top_k,
            capacity=capacity,
            relay=relay,
            buffers=in_flight,
            timeout=timeout,
            sms=sms,
            budget=budget,
            streams=streams,
        )
        self._adopted: DevicePlan | None = None
        self._kept: torch.Tensor | None = None  # schedule of copies that stay
        self._known: set[int] = set()  # layers that ranks have compared in words
        self._layers = 0
        self._watch = _Watch(self)

    @cached_property
    def comm(self) -> Communicator:
        """For what is not on the hot path: checkpoints of all experts."""
        if self.group is None and self.topology.ranks > 1:
            raise ConfigError(
                f"{self.topology.ranks} ranks of one process have no group to speak over"
            )
        return connect(self.group)

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
    ) -> DeviceGathered:
        """Stage 1: the exact loads of all ranks from the `[T, K]` ids of this one; -1: padding."""
        if ids.ndim != 2 or ids.shape[1] != self.top_k or len(ids) > self.tokens:
            raise LoadError(
                f"ids must be [up to {self.tokens} tokens, {self.top_k}], got {list(ids.shape)}"
            )
        self._watch.look()
        found = kinds(resolve(bundle or {}), inputs=inputs, weights=weights)
        if layer not in self._known:  # later, only ranks that differ would ask
            _agree("weights or inputs", self.data.peers.gather_objects(found))
            self._known.add(layer)
        kind = zlib.crc32(f"layer {layer}: {found}".encode()) >> 1
        loads = self.data.share_loads(self.control.count(ids.contiguous()), kind)
        return DeviceGathered(loads, layer)

    @unseen()
    def plan(self, gathered: DeviceGathered, *, policy: str | None = None) -> DevicePlan:
        """Stage 2: the plan of this step; every rank finds the same."""
        if policy not in (None, self.config.policy):
            raise ConfigError(
                f"policy {policy!r} for one call, but a device balancer keeps its own, "
                f"{self.config.policy!r}"
            )
        return self._adopted or self.control.plan(gathered.loads)

    def prepare(self, bundle: Bundle, width: int, dtype: torch.dtype) -> None:
        """Allocate everything for layers of these weights and rows, before the first step.

        Otherwise the first step does, which then must not be captured in a graph.
        """
        tensors = resolve(bundle)
        layout = Layout.of(tensors, self.data.streamer.homes)
        self.data.streamer.sources(layout, tensors)
        self.data.streamer.chunks_of_length(layout.nbytes)
        parameters = sum(t.shape[1:].numel() for t in tensors.values())
        self.data.prepare(layout, parameters, width * dtype.itemsize)

    def adopt(self, plan: Plan | None) -> None:
        """Use this plan, made by any policy, for all microbatches to come; None: plan again.

        It must be a plan for their loads: a replayed graph uses what was adopted last.
        """
        self._adopted = None if plan is None else self.control.adopt(plan)
        self._kept = None

    def keep(self, bundle: Bundle) -> None:
        """Send the copies of the adopted plan once: they stay while nothing else fills the slots.

        For weights that do not change, and one layer: nobody looks whether they have changed.
        """
        if self._adopted is None:
            raise ConfigError("nothing is adopted whose copies could be kept")
        self._kept = None
        replicas = DeviceReplicas(self.data, self._adopted, 0, bundle)
        with replicas:
            replicas.arrived()
        self._kept = replicas.made

    def replicate(
        self, plan: DevicePlan, gathered: DeviceGathered, bundle: Bundle
    ) -> DeviceReplicas:
        """Stage 3: spare slots filled with weights of `bundle`, for the time of a `with` block."""
        gathered.replicas = DeviceReplicas(self.data, plan, gathered.layer, bundle, self._kept)
        return gathered.replicas

    @unseen()
    def reroute(self, ids: torch.Tensor, plan: DevicePlan) -> DeviceRoutes:
        """Stage 4: a slot for every routed row of this rank."""
        assert plan.topology == self.topology
        return self.control.reroute(ids.contiguous(), counted=True)

    def roads(self, routes: DeviceRoutes, gathered: DeviceGathered) -> DeviceRoads:
        """The way of stages 5 and 7 between tokens and slots."""
        return DeviceRoads(self.data, routes, gathered.replicas)

    def check(self) -> None:
        """Raise what the device has noted since the last check; waits for it.

        A lost rank, rows that exceed the capacity, ids that are none. `gather` looks by itself,
        without waiting; after the replay of a graph, it is for the caller to ask.
        """
        self.data.check()
        self.control.check()

    def close(self) -> None:
        """Give back the shared memory; the process group stays."""
        self.data.peers.close()


class _Watch:
    """Looks at what the device has noted, without waiting for it: at notes of some steps ago."""

    def __init__(self, balancer: DeviceBalancer) -> None:
        self._balancer, cuda = balancer, balancer.control.device.type == "cuda"
        self._noted = torch.zeros(5, dtype=torch.int32, pin_memory=cuda)
        self._event: Any = torch.cuda.Event() if cuda else None
        self._asked = False

    def look(self) -> None:
        """Raise what was noted, as far as notes have come, and ask for the next ones."""
        if self._event is not None and torch.cuda.is_current_stream_capturing():
            return
        if self._asked and self._event is not None and not self._event.query():
            return
        if self._asked and self._noted.any():
            self._asked = False
            self._balancer.check()
        data, control = self._balancer.data, self._balancer.control
        noted = torch.cat([data.board.words[:1], data.exchange.faults[:1], control.faults])
        self._noted.copy_(noted, non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._asked = True


def _check_current(device: torch.device) -> None:
    """Kernels are launched on the current device."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ConfigError(
            f"the memory is on {device}, the current device is cuda:{torch.cuda.current_device()}: "
            "call torch.cuda.set_device first"
        )


def _check_positive(**settings: float) -> None:
    for name, value in settings.items():
        if value <= 0:
            raise ConfigError(f"{name} must be positive, got {value}")


def _agree(what: str, values: list[str]) -> None:
    if len(set(values)) > 1:
        listed = "; ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
        raise PlanMismatch(f"ranks disagree about the {what}: {listed}")
