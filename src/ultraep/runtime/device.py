"""DeviceBalancer: the same verbs as `Balancer`, and no host between them.

Loads, plan, routes, rows and weights stay on the GPUs of a group that map each other's memory.
Every verb launches the same kernels whatever the loads are, so a whole layer, forward and backward,
can be captured in a CUDA graph and replayed. Run one step before, so that memory is there.

Shapes: T tokens, K experts per token, R ranks, E experts, A rows that there is room for, L spare
slots, P parameters of an expert, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from ultraep.bundle import Bundle, Layout, kinds, resolve
from ultraep.comm import Peers
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError, LoadError, PlanMismatch
from ultraep.plan import Plan
from ultraep.runtime.control import ControlPlane, DevicePlan, DeviceRoutes
from ultraep.runtime.data import DataPlane
from ultraep.topology import Topology
from ultraep.version import __version__


@dataclass(slots=True)
class DeviceGathered:
    """The loads of all ranks, on the device, and what becomes of them."""

    loads: torch.Tensor  # [R, E]
    layer: int
    replicas: DeviceReplicas | None = None


class DeviceBalancer:
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
        capacity = 2 * tokens * top_k if capacity is None else capacity
        _check_positive(
            tokens=tokens, top_k=top_k, capacity=capacity, in_flight=in_flight, timeout=timeout
        )
        self.tokens, self.top_k = tokens, top_k
        self.topology = Topology(
            ranks=peers.size, experts=experts, slots=slots, domain=domain, homes=homes
        )
        self.rank = peers.rank
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
        self._kinds: dict[int, str] = {}  # of the bundle and the inputs, by layer
        self._layers = 0
        self._watch = _Watch(self)

    def register_layer(self) -> int:
        """A number for a layer; layers are made in the same order on all ranks."""
        self._layers += 1
        return self._layers - 1

    def gather(
        self,
        ids: torch.Tensor,
        *,
        layer: int = 0,
        bundle: Bundle | None = None,
        inputs: torch.Tensor | None = None,
    ) -> DeviceGathered:
        """Stage 1: the exact loads of all ranks from the `[T, K]` ids of this one; -1: padding."""
        if ids.ndim != 2 or ids.shape[1] != self.top_k or len(ids) > self.tokens:
            raise LoadError(
                f"ids must be [up to {self.tokens} tokens, {self.top_k}], got {list(ids.shape)}"
            )
        self._watch.look()
        self._agree_on(layer, kinds(resolve(bundle or {}), inputs))
        return DeviceGathered(self.data.share_loads(self.control.count(ids.contiguous())), layer)

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

    def reroute(self, ids: torch.Tensor, plan: DevicePlan) -> DeviceRoutes:
        """Stage 4: a slot for every routed row of this rank."""
        assert plan.topology == self.topology
        return self.control.reroute(ids.contiguous(), counted=True)

    def roads(self, routes: DeviceRoutes, gathered: DeviceGathered) -> DeviceRoads:
        """The way of stages 5 and 7 between tokens and slots."""
        return DeviceRoads(self.data, routes, gathered.replicas)

    def _agree_on(self, layer: int, found: str) -> None:
        """Ranks compare what they have whenever it is new to them."""
        if self._kinds.get(layer) != found:
            _agree("weights or inputs", self.data.peers.gather_objects(found))
            self._kinds[layer] = found

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


class DeviceReplicas:
    """The copies that one plan wants of one bundle of home weights."""

    def __init__(
        self,
        data: DataPlane,
        plan: DevicePlan,
        layer: int,
        bundle: Bundle,
        made: torch.Tensor | None = None,
    ) -> None:
        self._data, self._plan, self._bundle = data, plan, bundle
        self._name = f"layer {layer}"
        self.made = made  # the schedule: all that backward needs of the plan
        self._lent: ExitStack | None = None
        self._copies: dict[str, torch.Tensor] = {}
        self.sms = data.sms

    @property
    def num_homes(self) -> int:
        return self._data.streamer.homes

    def __enter__(self) -> dict[str, torch.Tensor]:
        """`[L, ...]` for every tensor of the bundle; they have come when `arrived` was called."""
        if self._lent is None:
            self.begin()
        return self._copies

    def __exit__(self, *error: object) -> None:
        assert self._lent is not None, "left a block that was not entered"
        self._lent.close()
        self._lent = None

    def begin(self) -> None:
        """Begin to fill the slots, aside; nothing is sent if they still hold what is wanted."""
        data, tensors = self._data, resolve(self._bundle)
        layout = Layout.of(tensors, self.num_homes)
        with ExitStack() as stack:
            buffer = stack.enter_context(data.lend(self._name))
            rows = data.slots(layout, buffer)
            slots = data.topology.slots
            self._copies = layout.views(
                rows.local[: slots * layout.nbytes].view(slots, layout.nbytes)
            )
            if slots:
                with data.overlap.aside("weights"):
                    if self.made is None:
                        self.made = rows.local.new_empty(data.streamer.size, dtype=torch.int32)
                        data.streamer.schedule(self._plan.replicas, layout, self.made)
                    data.streamer.fill(self.made, layout, tensors, rows, buffer)
            self._lent = stack.pop_all()

    def arrived(self) -> None:
        """From here on, the weights of all copies are there."""
        self._data.overlap.join("weights")

    def served_rows(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[A, D] where others can pull from."""
        nbytes = self._data.exchange.layout.served_bytes(width * dtype.itemsize)
        region = self._data.to_write("served", nbytes)
        return self._data.exchange.served_rows(region, width, dtype)

    def served_scalars(self) -> torch.Tensor:
        """[A] a number beside each row that is served."""
        return self._plan.loads.new_empty(self._data.capacity, dtype=torch.float32)

    def gradient_rows(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[L, P] for the gradients of this rank's copies; the memory is shared by all layers."""
        slots = self._data.topology.slots
        if not slots:
            return torch.empty(0, width, dtype=dtype, device=self._data.peers.device)
        rows = self._data.gradients(width, dtype).local.view(dtype)
        return rows[: slots * width].view(slots, width)

    def reduce(self, gradients_HP: torch.Tensor) -> None:
        """Stage 8: begin to add the gradients of all copies to those of the home experts."""
        if self.made is not None:
            self._data.reduce(gradients_HP, self.made)

    def reduced(self) -> None:
        """From here on, they are added, and the rows of the copies may be written again."""
        self._data.overlap.join("gradients")


class DeviceRoads:
    """Both directions of the way between tokens and slots; each rank pulls what it needs."""

    def __init__(
        self, data: DataPlane, routes: DeviceRoutes, replicas: DeviceReplicas | None
    ) -> None:
        self._data, self._routes, self._replicas = data, routes, replicas
        self._ways = data.exchange.ways()
        self._shape = routes.slots.shape
        self.counts = self._ways.offsets

    def on_return(self) -> None:
        """Backward begins: the weights of the copies are needed again."""
        if self._replicas is not None:
            self._replicas.begin()

    def to_slots(
        self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[A, D] a row for each choice of every token, and `[A]` its scalar, in slot order."""
        data, exchange, routes = self._data, self._data.exchange, self._routes
        values_TD = values_TD.contiguous()
        nbytes = exchange.layout.value_bytes(values_TD.shape[1] * values_TD.itemsize)
        exchange.expose_values(values_TD, data.to_write("values", nbytes))
        if scalars_TK is not None:
            exchange.tables(routes.rows_of_slot, routes.receive_counts, self._ways)
            exchange.expose(routes.order, scalars_TK.contiguous())
        data.meet()
        if scalars_TK is not None:
            exchange.origins(routes.receive_counts, self._ways)
            exchange.landings(routes.slots, routes.positions, self._ways)
        rows_AD = values_TD.new_empty(data.capacity, values_TD.shape[1])
        exchange.gather_rows(data.to_read("values", nbytes), self._ways, rows_AD)
        return rows_AD, None if scalars_TK is None else self._ways.weights

    def to_tokens(
        self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, D] the rows of each token, summed in the order of its choices; `[T, K]` scalars."""
        data, exchange, width = self._data, self._data.exchange, rows_AD.shape[1]
        nbytes = exchange.layout.served_bytes(width * rows_AD.itemsize)
        served = exchange.served_rows(data.region("served", nbytes), width, rows_AD.dtype)
        if rows_AD.data_ptr() != served.data_ptr():
            data.to_write("served", nbytes)
            served.copy_(rows_AD)
        scalars_TK = None
        if scalars_A is not None:
            exchange.served_scalars(data.to_write("served", nbytes)).copy_(scalars_A)
            scalars_TK = scalars_A.new_empty(self._shape)
        data.meet()
        sums_TD = rows_AD.new_empty(self._shape[0], width)
        exchange.sum_rows(data.to_read("served", nbytes), self._ways, sums_TD, scalars_TK)
        return sums_TD, scalars_TK


class _Watch:
    """Looks at what the device noted a step ago, without waiting for it."""

    def __init__(self, balancer: DeviceBalancer) -> None:
        self._balancer = balancer
        self._seen: torch.Tensor | None = None
        self._event: Any = None

    def look(self) -> None:
        """Raise what was noted by the last step whose notes have come."""
        balancer = self._balancer
        device = balancer.control.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        if self._seen is not None and (self._event is None or self._event.query()):
            if self._seen.any():
                balancer.check()
            self._seen = None
        if self._seen is None:
            noted = torch.cat(
                [
                    balancer.data.board.words[:1],
                    balancer.data.exchange.faults[:1],
                    balancer.control.faults,
                ]
            )
            if device.type == "cuda":
                self._seen = torch.empty(noted.shape, dtype=noted.dtype, pin_memory=True)
                self._seen.copy_(noted, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()
            else:
                self._seen = noted


def _check_positive(**settings: float) -> None:
    for name, value in settings.items():
        if value <= 0:
            raise ConfigError(f"{name} must be positive, got {value}")


def _agree(what: str, values: list[str]) -> None:
    if len(set(values)) > 1:
        listed = "; ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
        raise PlanMismatch(f"ranks disagree about the {what}: {listed}")
