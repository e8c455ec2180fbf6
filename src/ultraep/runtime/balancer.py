"""Balancer: one per expert-parallel group; the microbatches of all its layers begin here.

    index = balancer.register_layer()                        # once for each layer
    layer = Layer(index, weights, experts)                   # see `ultraep.microbatch`
    microbatch = balancer.begin(layer, ids, gates, tokens)

All ranks do so in the same order. A data plane, `messages` or `mapped`, carries the microbatches of
a device; it is chosen with the first one. Observers see what it does (`observe.py`).

Shapes: T tokens, K experts per token, D model width.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import torch

from ultraep import __version__
from ultraep.backends import compile_in_background
from ultraep.bundle import Bundle
from ultraep.comm import Communicator, Peers
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.loads import count_loads
from ultraep.microbatch import DataPlane, Inputs, Layer, Microbatch, MicrobatchInfo
from ultraep.ops.modes import refuse_transforms, unseen
from ultraep.plan import plan as make_plan
from ultraep.policies import get_policy
from ultraep.reroute import reroute
from ultraep.runtime.agreement import Agreement, Place, Point
from ultraep.runtime.backward import in_backward
from ultraep.runtime.capacity import AUTO, check_config, check_topology, default_config
from ultraep.runtime.clocks import clock_of
from ultraep.runtime.connect import (
    ALONE,
    Choice,
    GroupOrName,
    choose,
    connect,
    resolve_group,
    warn_if_idle,
)
from ultraep.runtime.mapped.peers import SilentCommunicator
from ultraep.runtime.messages.plane import MessagesPlane
from ultraep.runtime.microbatch import Shared
from ultraep.runtime.observe import Clock, Observer, Observers, Sink
from ultraep.runtime.pricing import Pricing, from_environment, measurable
from ultraep.runtime.recording import Recording, open_recorder, wanted
from ultraep.runtime.replays import ReplayedPlans
from ultraep.runtime.settings import DeviceShare, Settings
from ultraep.runtime.stats import Stats
from ultraep.runtime.versions import Versions
from ultraep.topology import Topology


class _Carrier(NamedTuple):
    """What carries and times the microbatches of one device."""

    choice: Choice
    plane: DataPlane
    clock: Clock


class Balancer:
    """Balances every microbatch of every layer of one expert-parallel group.

    group: the expert-parallel process group; None: the default group; "alone": this process.
    experts, slots, domain, homes: see `Topology`.
    config or policy: how to balance; `policy` alone is short for `BalanceConfig(policy=...)`, with
        `objective="balance"` where the capacity is static. With the objective "time" and no rates,
        these are measured with the first microbatch of a layer, unless the environment variable
        ULTRAEP_RATES gives them, or is "off": docs/cost.md.
    data_plane: "mapped", GPUs that map each other's memory, and no host between the stages;
        "messages" of torch.distributed; "auto": mapped where all ranks can.
    tokens: of the mapped plane: the most tokens of a rank in a microbatch. None: learnt from the
        first microbatch, grown when one has more.
    capacity: rows that a rank has room for. "auto": learnt, and grown outside of graphs; "static":
        the mean of all ranks, refused where plans could exceed it, see `runtime/capacity.py`.
    backend: "triton", "cpu" or "reference"; None: the best one where the ids are.
    relay: how weights travel, "direct", "chain", or "auto": the faster one for each plan.
    chunks: pieces of an expert in a chain of messages.
    in_flight: buffers of spare slots, for callers that keep several filled at the same time, and
        for layers that are to find their copies again.
    verify: compare the plans of all ranks, and where they are in backward. Without it, only loads
        are compared: a rank that skips a backward pass may stop the others, or go unnoticed.
    transport: of messages: "auto", "shared" (memory, CPU ranks of one host) or "sockets" (the
        group's own).
    timeout: seconds after which a silent rank is an error; None: the group's own (those of
        torch.distributed: 30 minutes with gloo, 10 with NCCL). A rank that died is one at once.
    record: folder for a trace of every microbatch, on all ranks; None: one inside the folder that
        the environment variable ULTRAEP_TRACE names, or none.
    communicator, peers: in place of a group, for ranks that are no processes (`LocalGroup`), and
        for memory that they share (`LocalPeers`).
    share: the part of a GPU that this rank may use; None: all of it.
    """

    def __init__(
        self,
        group: GroupOrName = None,
        *,
        experts: int,
        slots: int = 1,
        domain: int | None = None,
        homes: Sequence[int] | None = None,
        config: BalanceConfig | None = None,
        policy: str | None = None,
        data_plane: str = "auto",
        tokens: int | None = None,
        capacity: int | str = AUTO,
        backend: str | None = None,
        relay: str = "auto",
        chunks: int = 4,
        in_flight: int = 1,
        verify: bool = True,
        transport: str = "auto",
        timeout: float | None = None,
        record: str | Path | None = None,
        communicator: Communicator | None = None,
        peers: Peers | None = None,
        share: DeviceShare | None = None,
    ) -> None:
        if config is not None and policy is not None:
            raise ConfigError(f"give config or policy, not both: {config} and {policy!r}")
        self.config = from_environment(config or default_config(policy, capacity))
        get_policy(self.config.policy)
        self.settings = Settings(
            backend=backend,
            relay=relay,
            chunks=chunks,
            in_flight=in_flight,
            verify=verify,
            transport=transport,
            data_plane=data_plane,
            tokens=tokens,
            capacity=capacity,
            timeout=timeout,
            share=share,
        )
        check_config(capacity, self.config)
        self._peers, own_ranks = peers, communicator is not None or peers is not None
        self.group = None if own_ranks and group is None else resolve_group(group)
        warm_up(backend)
        self._join(communicator, record, (experts, slots, domain, homes))
        chosen = own_ranks or group == ALONE
        warn_if_idle(self.rank, self.topology, self.config.policy, chosen=chosen)
        self._pricing = Pricing(self.topology, self.comm, self._agreement)
        self._layers = self._steps = 0
        self._versions, self._stats = Versions(), Stats()
        self._observers: list[Observer] = []
        recording = [] if self._recording is None else [self._recording]
        self._sinks: list[Sink] = [self._stats, *recording]  # of all clocks
        self._carriers: dict[torch.device, _Carrier] = {}

    def _join(
        self, communicator: Communicator | None, record: str | Path | None, topology: Any
    ) -> None:
        """Meet the other ranks, and compare settings with them; collective."""
        experts, slots, domain, homes = topology
        settings = self.settings
        with ExitStack() as undo:
            peers = self._peers
            if communicator is None and self.group is None and peers is not None:
                communicator = SilentCommunicator(peers.rank, peers.size)
            self.comm = communicator or undo.enter_context(
                closing(connect(self.group, transport=settings.transport, timeout=settings.timeout))
            )
            self.topology = Topology(
                ranks=self.comm.size, experts=experts, slots=slots, domain=domain, homes=homes
            )
            check_topology(settings.capacity, self.topology, self.config)
            self.config = measurable(self.config, self.comm)
            agreed = (self.topology, self.config, settings.agreed(), wanted(record), __version__)
            self._agreed = repr(agreed)
            self._agreement = Agreement(self.comm, self._agreed, experts)
            self.recorder = open_recorder(record, self.comm, self.topology, self.config, settings)
            undo.pop_all()
        self._recording = None if self.recorder is None else Recording(self.recorder, self.rank)

    def __repr__(self) -> str:
        chosen = [
            f"{carrier.choice.name} on {device}: {carrier.choice.reason}"
            for device, carrier in self._carriers.items()
        ]
        topology, config = self.topology, self.config
        return (
            f"Balancer(rank {self.rank} of {self.comm.size}, {topology.experts} experts, "
            f"{topology.slots} slots, policy {config.policy!r}, {self._pricing.told(config)}, "
            f"data plane {'; '.join(chosen) or 'not chosen before the first microbatch'})"
        )

    def __copy__(self) -> Self:
        """Belong to the running processes: copies of a module share their balancer."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            "a Balancer belongs to running processes and is in no file: save the state_dict() of a "
            "module (its own experts), or the full_state_dict() of a layer (all)"
        )

    @property
    def rank(self) -> int:
        return self.comm.rank

    def register_layer(self) -> int:
        """Return the number of a new layer; all ranks create their layers in the same order."""
        self._layers += 1
        return self._layers - 1

    @unseen()
    def begin(
        self,
        layer: Layer,
        ids: torch.Tensor,
        gates: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        *,
        policy: str | None = None,
    ) -> Microbatch:
        """Begin a microbatch of a layer; the first one on a device is collective.

        layer: its number, weights and stage 6, as they are now.
        ids: `[T, K]` the experts that the router chose for every token; -1: padding.
        gates, tokens: `[T, K]` and `[T, D]` as they are to be sent; optional for callers that
            only count and plan, or that send the rows themselves.
        policy: in place of the balancer's, for this microbatch.
        """
        refuse_transforms()
        self._steps += 1
        carrier = self._carrier(ids.device)
        info = MicrobatchInfo(
            layer.index,
            self._steps,
            in_backward(),
            began=time.time(),
            timed=carrier.clock.times(self._steps),
        )
        config = self.config if policy is None else replace(self.config, policy=policy)
        shares_slots = max(self._layers, layer.index + 1) > self.settings.in_flight
        return carrier.plane.begin(Inputs(info, layer, config, ids, gates, tokens, shares_slots))

    def plane(self, device: torch.device | str) -> DataPlane:
        """The data plane for tokens on that device; collective when it is first called."""
        return self._carrier(device).plane

    def _carrier(self, device: torch.device | str) -> _Carrier:
        if isinstance(device, str) or device.index is None:
            device = torch.empty(0, device=device).device
        if device not in self._carriers:
            place = Place(Point.PLANE, 0, self._steps)
            meet = partial(self._agreement.meet, place, device)
            choice = choose(self.comm, self.settings, device, self._peers, meet)
            recording, replays = self._recording, None
            if recording is not None and device.type == "cuda" and choice.peers is not None:
                replays = ReplayedPlans(recording, self.topology, device)
            recorded = recording is not None
            clock = clock_of(device, self._sinks, self.rank, recorded=recorded, replays=replays)
            self._carriers[device] = _Carrier(choice, self._make_plane(choice, clock), clock)
        return self._carriers[device]

    def _make_plane(self, choice: Choice, clock: Clock) -> DataPlane:
        shared = Shared(
            self.comm,
            self.topology,
            self.config,
            self.settings,
            self._agreement,
            self._versions,
            self._pricing,
            Observers(clock, self._observers),
        )
        if choice.peers is None:
            return MessagesPlane(shared)
        from ultraep.runtime.mapped.plane import MappedPlane  # triton, only where it is used

        return MappedPlane(shared, choice.peers, self._agreed)

    def prepare(self, ids: torch.Tensor, rows: torch.Tensor, bundle: Bundle) -> None:
        """Take all memory that microbatches like this need; collective. Otherwise the first does.

        A graph can then be captured without a step before.
        """
        self.plane(ids.device).prepare(ids, rows, bundle)

    def observe(self, observer: Observer) -> None:
        """Tell this observer, too, what happens from now on."""
        self._observers.append(observer)

    def add_sink(self, sink: Sink) -> None:
        """Pass what the clocks of the data planes observe from now on to this sink, too."""
        self._sinks.append(sink)

    def at_state(self, layer: int, device: torch.device) -> None:
        """Before the experts of all ranks are gathered: raise if not all ranks are about to."""
        self._agreement.meet(Place(Point.STATE, layer, self._steps), device)

    def record_step(self, step: int) -> None:
        """Say to which step of training the next microbatches belong, if they are recorded.

        Unless that is said, the microbatches of a layer count as steps. Replays of graphs, too, in
        the order of the current stream; those of before are fetched here, without waiting.
        """
        if self._recording is not None:
            for carrier in self._carriers.values():
                carrier.clock.begin_step(step)  # what was not noted yet belongs to the step before
            self._recording.begin_step(step)

    @contextmanager
    def unchanged_weights(self) -> Iterator[None]:
        """Promise that the weights of this rank's home experts do not change in this block.

        Replicas still in their slots are then not sent again: for serving, and for the microbatches
        between two optimizer steps. Otherwise replicas serve one microbatch, forward and backward,
        since torch does not see every write. Writes that torch sees, steps of its optimizers and
        other tensors than before are noticed. Call `weights_changed` after any other write, and
        before `torch.utils.swap_tensors`. One rank alone may promise.

        It holds for replays of graphs in the block, in the order of the current stream; there, only
        `weights_changed` reports changes. A capture promises nothing.
        """
        try:
            with self._versions.unchanged():
                self._promise()
                yield
        finally:
            self._promise()

    def _promise(self) -> None:
        """Tell the devices what is promised from here on."""
        for carrier in self._carriers.values():
            carrier.plane.promise()

    @property
    def weights_promise(self) -> int:
        """The number of the promise that weights do not change; 0: there is none."""
        return self._versions.promise

    def weights_changed(self) -> None:
        """Say that weights of this rank have changed in spite of a promise. One rank may."""
        self._versions.changed()
        self._promise()

    def stats(self) -> dict[str, Any]:
        """What was planned and moved so far, and the seconds of every stage on this rank.

        A forward pass that is computed again in backward counts twice. Waits for a device, where
        the seconds of all microbatches are concluded from those of the `timed` ones.
        """
        self._settle()
        held = sum(carrier.plane.nbytes for carrier in self._carriers.values())
        return self._stats.summary() | {"pool_bytes": held, "rates": self._pricing.known()}

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._settle()
        self._stats.reset()

    def _settle(self) -> None:
        for carrier in self._carriers.values():
            carrier.clock.settle()

    def check(self) -> None:
        """Raise what a device has noted and the host has not seen yet; waits for it.

        A lost rank, more rows than the capacity, invalid ids. `count` looks by itself, without
        waiting; after the replay of a graph, call this.
        """
        for carrier in self._carriers.values():
            carrier.plane.check()

    def close(self) -> None:
        """Write the rest of the trace, give back memory and the communicator's resources."""
        for carrier in self._carriers.values():
            carrier.clock.finish()
        if self.recorder is not None:
            self.recorder.close()
        for carrier in self._carriers.values():
            carrier.plane.close()
        self.comm.close()


@cache
def warm_up(backend: str | None) -> None:
    """Load or compile what a step needs before joining a group, so that no rank waits for another.

    Without a named backend, a child process compiles the planner and the first steps do without.
    """
    if backend is None:
        compile_in_background()
    topology, ids = Topology(ranks=2, experts=2), torch.zeros(2, 1, dtype=torch.int64)
    loads = [count_loads(ids, topology.experts, backend=backend)] * topology.ranks
    plan = make_plan(loads, topology, BalanceConfig(tolerance=0.1), backend=backend)
    reroute(ids, plan, 0, backend=backend)
