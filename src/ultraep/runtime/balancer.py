"""Balancer: one per expert-parallel group; the stages that need the group, whatever carries them.

Its verbs are `gather` (1), `plan` (2), `replicate` (3, and 8 in backward) and `reroute` (4, and the
exchange of 5 and 7). All ranks call them in the same order. A data plane (`plane.py`) does it all,
`messages` or `mapped`, chosen with the first microbatch. Observers see what it does (`observe.py`).

Shapes: T tokens, K experts per token, R ranks, E experts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ultraep import __version__
from ultraep.bundle import Bundle
from ultraep.comm import Communicator, Peers
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.ops.modes import refuse_transforms, unseen
from ultraep.plane import AnyPlan, Copies, DataPlane, Exchange, Loads, Microbatch
from ultraep.policies import get_policy
from ultraep.runtime.agreement import Agreement, Place, Point
from ultraep.runtime.backward import in_backward
from ultraep.runtime.capacity import AUTO, check_config, check_topology, default_config
from ultraep.runtime.choice import Choice, choose
from ultraep.runtime.clocks import clock_of
from ultraep.runtime.connect import ALONE, GroupOrName, connect, resolve_group, warn_if_idle
from ultraep.runtime.mapped.peers import SilentCommunicator
from ultraep.runtime.messages.plane import MessagesPlane
from ultraep.runtime.observe import Notebook, ObservedCopies, ObservedExchange, Observer, Watch
from ultraep.runtime.pricing import Group, Pricing, from_environment, measurable
from ultraep.runtime.rates import Serve
from ultraep.runtime.recording import Recording, open_recorder, wanted
from ultraep.runtime.replays import ReplayedPlans
from ultraep.runtime.settings import DeviceShare, Settings
from ultraep.runtime.stats import Stats
from ultraep.runtime.unique import Unique
from ultraep.runtime.versions import Versions
from ultraep.runtime.warm_up import warm_up
from ultraep.topology import Topology


class Balancer(Unique):
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
        self._pricing = Pricing(self.topology)
        self._layers = self._steps = 0
        self._versions, self._watch, self._stats = Versions(), Watch(), Stats()
        recording = [] if self._recording is None else [self._recording]
        self._notebooks: list[Notebook] = [self._stats, *recording]  # of all clocks
        self._planes: dict[torch.device, tuple[Choice, DataPlane, Any]] = {}

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
        chosen = [f"{c.name} on {device}: {c.reason}" for device, (c, *_) in self._planes.items()]
        topology, config = self.topology, self.config
        return (
            f"Balancer(rank {self.rank} of {self.comm.size}, {topology.experts} experts, "
            f"{topology.slots} slots, policy {config.policy!r}, {self._pricing.told(config)}, "
            f"data plane {'; '.join(chosen) or 'not chosen before the first microbatch'})"
        )

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
        rows: torch.Tensor | None = None,
        gates: torch.Tensor | None = None,
    ) -> Loads:
        """Stage 1: the exact loads of all ranks from the `[T, K]` ids of this one; -1: padding.

        bundle, rows, gates: what is to be copied, the tokens as they are to be sent, and the gates
        of their choices; ranks compare of which kind they are and whether they want gradients.
        """
        refuse_transforms()
        self._steps += 1
        plane, clock = self.plane(ids.device), self._watch.clock
        assert clock is not None
        microbatch = Microbatch(
            layer, self._steps, in_backward(), began=time.time(), timed=clock.times(self._steps)
        )
        with self._watch.stage("loads", microbatch):
            loads: Loads = plane.gather(ids, microbatch, bundle or {}, rows=rows, gates=gates)
        return loads

    @unseen()
    def learn_rates(
        self,
        loads: Loads,
        serve: Serve,
        bundle: Bundle,
        rows: torch.Tensor,
        gates: torch.Tensor,
        *,
        policy: str | None = None,
    ) -> None:
        """Between stages 1 and 2: measure what rows and copies of such a layer cost, if need be.

        Once for each kind of layer, by all ranks together; then it costs nothing. Without it, and
        without `BalanceConfig(rates=...)`, plans are made for balance.

        serve: stage 6, `serve(arrivals, copies)`, which is tried on made-up rows.
        """
        if self._pricing.lacks(loads.microbatch, self._config_for(policy)):
            group = Group(self.comm, self._agreement, self._plane_of(loads), self._watch)
            again = max(self._layers, self._pricing.layers + 1) > self.settings.in_flight
            self._pricing.learn(group, loads, serve, bundle, rows, gates, again=again)

    @unseen()
    def plan(self, loads: Loads, *, policy: str | None = None) -> Any:
        """Stage 2: the plan of this microbatch; every rank finds the same.

        A `Plan`, or on the mapped plane one that has not left the device; both have `to_host`.
        """
        plane, microbatch = self._plane_of(loads), loads.microbatch
        config = self._pricing.config(loads, self._config_for(policy))
        with self._watch.stage("plan", microbatch):
            plan: AnyPlan = plane.plan(loads, config)
        self._watch.planned(microbatch, plan)
        if self.settings.verify:
            with self._watch.stage("verify", microbatch):
                plane.verify(plan, loads)
        return plan

    def _config_for(self, policy: str | None) -> BalanceConfig:
        return self.config if policy is None else replace(self.config, policy=policy)

    def replicate(self, plan: AnyPlan, loads: Loads, bundle: Bundle) -> Copies:
        """Stage 3: spare slots filled with weights of `bundle`, for the time of a `with` block."""
        copies = self._plane_of(loads).replicate(plan, loads, bundle)
        return ObservedCopies(copies, loads.microbatch, self._watch)

    @unseen()
    def reroute(self, ids: torch.Tensor, plan: AnyPlan, loads: Loads) -> Exchange:
        """Stage 4: a slot for every routed row of this rank, and the exchange of stages 5 and 7."""
        with self._watch.stage("reroute", loads.microbatch):
            exchange = self._plane_of(loads).reroute(ids, plan, loads)
        return ObservedExchange(exchange, loads.microbatch, self._watch)

    def plane(self, device: torch.device | str) -> DataPlane:
        """The data plane for tokens on that device; collective when it is first asked for."""
        if isinstance(device, str) or device.index is None:
            device = torch.empty(0, device=device).device
        if device not in self._planes:
            place = Place(Point.PLANE, 0, self._steps)
            meet = partial(self._agreement.meet, place, device)
            chosen = choose(self.comm, self.settings, device, self._peers, meet)
            plane = self._make(chosen)
            recorded, replays = self._recording is not None, None
            if self._recording is not None and device.type == "cuda" and chosen.peers is not None:
                replays = ReplayedPlans(self._recording, self.topology, device)
            clock = clock_of(device, self._notebooks, self.rank, recorded=recorded, replays=replays)
            self._planes[device] = chosen, plane, clock
        _, plane, clock = self._planes[device]
        self._watch.clock = clock
        return plane

    def _make(self, chosen: Choice) -> DataPlane:
        common: dict[str, Any] = {
            "topology": self.topology,
            "config": self.config,
            "settings": self.settings,
            "agreement": self._agreement,
            "versions": self._versions,
            "watch": self._watch,
        }
        if chosen.peers is None:
            return MessagesPlane(self.comm, **common)
        from ultraep.runtime.mapped.plane import MappedPlane  # triton, only where it is used

        return MappedPlane(chosen.peers, comm=self.comm, agreed=self._agreed, **common)

    def _plane_of(self, loads: Loads) -> Any:
        return self._planes[loads.on_device.device][1]

    def prepare(self, ids: torch.Tensor, rows: torch.Tensor, bundle: Bundle) -> None:
        """Take all memory that microbatches like this need; collective. Otherwise the first does.

        A graph can then be captured without a step before.
        """
        self.plane(ids.device).prepare(ids, rows, bundle)

    def observe(self, observer: Observer) -> None:
        """Tell this observer, too, what happens from now on."""
        self._watch.others.append(observer)

    def note_in(self, notebook: Notebook) -> None:
        """Write what the clocks of the data planes note from now on into this notebook, too."""
        self._notebooks.append(notebook)

    def at_state(self, layer: int, device: torch.device) -> None:
        """Before the experts of all ranks are gathered: raise if not all ranks are about to."""
        self._agreement.meet(Place(Point.STATE, layer, self._steps), device)

    def record_step(self, step: int) -> None:
        """Say to which step of training the next microbatches belong, if they are recorded.

        Unless that is said, the microbatches of a layer count as steps. Replays of graphs, too, in
        the order of the current stream; those of before are fetched here, without waiting.
        """
        if self._recording is not None:
            for *_, clock in self._planes.values():
                clock.begin_step(step)  # what was not noted yet belongs to the step before
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
        for _, plane, _ in self._planes.values():
            plane.promise()

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
        held = sum(plane.nbytes for _, plane, _ in self._planes.values())
        return self._stats.summary() | {"pool_bytes": held, "rates": self._pricing.known()}

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._settle()
        self._stats.reset()

    def _settle(self) -> None:
        for *_, clock in self._planes.values():
            clock.settle()

    def check(self) -> None:
        """Raise what a device has noted and the host has not seen yet; waits for it.

        A lost rank, rows that exceed the capacity, ids that are none. `gather` looks by itself,
        without waiting; after the replay of a graph, it is for the caller to ask.
        """
        for _, plane, _ in self._planes.values():
            plane.check()

    def close(self) -> None:
        """Write the rest of the trace, give back memory and the communicator's resources."""
        for *_, clock in self._planes.values():
            clock.finish()
        if self.recorder is not None:
            self.recorder.close()
        for _, plane, _ in self._planes.values():
            plane.close()
        self.comm.close()
