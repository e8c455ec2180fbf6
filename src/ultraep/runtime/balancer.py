"""Balancer: one per expert-parallel group; the microbatches of all its layers begin here.

    index = balancer.register_layer()                        # once for each layer
    layer = Layer(index, weights, experts)                   # see `ultraep.microbatch`
    microbatch = balancer.begin(layer, ids, gates, tokens)

All ranks make these calls in the same order. A data plane (`messages` or `mapped`) carries the
microbatches of a device; ranks choose it at the first microbatch. Subscribers receive the record of
every pass (`ultraep.passes`).

Shapes: T tokens, K experts per token, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import torch

from ultraep.backends import select
from ultraep.config import AUTO, BalanceConfig, from_environment
from ultraep.dispatch import Dispatcher
from ultraep.errors import ConfigError, UltraEPError, errors_at
from ultraep.inputs import Inputs, Layer
from ultraep.microbatch import Context, Microbatch
from ultraep.ops.modes import outside_dispatch_modes, refuse_transforms
from ultraep.passes import LEARNT, TIMED, Passes, PassLog, Subscriber
from ultraep.policies import running_policy
from ultraep.position import At, Position, Steps
from ultraep.replicas import NO_PASS, backward_pass
from ultraep.runtime.connect import Group, join, resolve_ranks, warn_if_idle
from ultraep.runtime.cost import CostModel
from ultraep.runtime.planes import Choice, DataPlane, PlaneRequest, choose, plane_kinds
from ultraep.runtime.recording import Recording
from ultraep.runtime.settings import Settings, experts_and_homes
from ultraep.runtime.speeds import Speeds
from ultraep.runtime.stats import StatsByPolicy
from ultraep.topology import Topology


class DeviceState(NamedTuple):
    """The data plane of one device."""

    choice: Choice
    plane: DataPlane


class Balancer:
    """Balances every microbatch of every layer of one expert-parallel group.

    group: the expert-parallel process group; None: the default group; "alone": this process; or a
        `Communicator`, for ranks that are not processes (`LocalGroup`).
    experts: number of experts, which divides evenly over the ranks; or the home rank of each one.
    slots: spare slots of every rank.
    domain: consecutive ranks that a fast link joins: replicas stay inside. None: the ranks of a
        host, or of hosts that an NVLink fabric joins.
    config or policy: how to balance. `policy` alone is short for `BalanceConfig(policy=...)`.
        With the objective "time" and no rates, the first microbatch of a layer measures rates,
        unless the environment variable ULTRAEP_RATES contains rates or "off": docs/cost.md.
        ULTRAEP_POLICY replaces the policy.
    data_plane: "mapped": GPUs map each other's memory, and the host reads the plan once per layer;
        "hybrid": they do so inside of each domain, and messages carry tokens between domains;
        "messages" of torch.distributed; "auto": the first of these that the ranks can use.
    capacity: the most rows that a rank can serve. "auto": no limit, except in a captured graph.
    in_flight: buffers of spare slots: microbatches that can hold replicas at the same time.
    timeout: seconds after which a silent rank is an error; None: the timeout of the group (30
        minutes with gloo, 10 with NCCL). A rank that died is an error within seconds.
    record: directory for a trace of every microbatch, on all ranks; None: a new one inside the
        directory in the environment variable ULTRAEP_TRACE, if it is set.
    dispatcher: moves the rows in place of the data plane, for example through DeepEP; see
        docs/dispatchers.md. None: the data plane moves them.
    """

    def __init__(
        self,
        group: Group = None,
        *,
        experts: int | Sequence[int],
        slots: int = 1,
        domain: int | None = None,
        config: BalanceConfig | None = None,
        policy: str | None = None,
        data_plane: str = AUTO,
        capacity: int | str = AUTO,
        in_flight: int = 1,
        timeout: float | None = None,
        record: str | Path | None = None,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        settings = Settings(
            data_plane=data_plane,
            capacity=capacity,
            in_flight=in_flight,
            timeout=timeout,
            dispatcher=dispatcher,
        )
        self._set_up(group, settings, experts, slots, domain, config, policy, record)

    @classmethod
    def _with_settings(cls, group: Group = None, **options: Any) -> Self:
        """Return a balancer with settings that only tests and benchmarks choose.

        options: all fields of `Settings`, and the other arguments of `Balancer`.
        """
        names = {field.name for field in fields(Settings)} & options.keys()
        settings = Settings(**{name: options.pop(name) for name in names})
        balancer = cls.__new__(cls)
        balancer._set_up(group, settings, **options)
        return balancer

    def _set_up(
        self,
        group: Group,
        settings: Settings,
        experts: int | Sequence[int],
        slots: int = 1,
        domain: int | None = None,
        config: BalanceConfig | None = None,
        policy: str | None = None,
        record: str | Path | None = None,
    ) -> None:
        """Check all arguments, then join the other ranks; collective."""
        if config is not None and policy is not None:
            raise ConfigError(f"give config or policy, not both: {config} and {policy!r}")
        default = BalanceConfig() if policy is None else BalanceConfig(policy=policy)
        config = from_environment(config or default)
        running_policy(config.policy)
        plane_kinds(settings.data_plane)
        ranks = resolve_ranks(group)
        if settings.backend is not None or not torch.cuda.is_available():
            select(settings.backend)  # compiles it, before other ranks wait
        count, homes = experts_and_homes(experts)
        topology = partial(Topology, experts=count, slots=slots, domain=domain, homes=homes)
        joined = join(ranks, topology, config, settings, record)
        self.settings, self.group = settings, ranks.group
        self.comm, self.topology, self._config = joined.comm, joined.topology, joined.config
        self._joined, self._agreement = joined, joined.agreement
        self.flight, self.recorder = joined.agreement.flight, joined.recorder
        warn_if_idle(self.rank, self.topology, self.config.policy, chosen=ranks.chosen)
        self._count, self._layers, self._devices = 0, 0, dict[torch.device, DeviceState]()
        self._stats, self._steps = StatsByPolicy(), Steps()
        learns = self.config.speeds == AUTO
        self._cost = CostModel(self.topology, self.comm, self._agreement, always=learns)
        self._speeds = Speeds(self.rank, self._cost) if learns and self.comm.size > 1 else None
        self._plan_config = replace(self.config, speeds=None) if learns else self.config
        self._hosts = self.comm if self._speeds is None else self.comm.hosts()
        self._host_agreement = self._agreement.over(self._hosts)
        every = 1 if self.recorder is not None else LEARNT if learns else TIMED
        self.log = PassLog(self.rank, self.flight, every)
        self.log.subscribe(self._stats.add)
        self.log.reads_plans = self.comm.size > 1
        if self.recorder is not None:
            self.subscribe(Recording(self.recorder, self.rank).add)
        if self._speeds is not None:
            self.log.subscribe(self._speeds.add)

    def __repr__(self) -> str:
        chosen = [
            f"{state.choice.kind.name} on {device}: {state.choice.reason}"
            for device, state in self._devices.items()
        ]
        topology, config, dispatcher = self.topology, self.config, self.settings.dispatcher
        rows_by = "" if dispatcher is None else f", rows by {type(dispatcher).__qualname__}"
        return (
            f"Balancer(rank {self.rank} of {self.comm.size}, {topology.experts} experts, "
            f"{topology.slots} slots, policy {config.policy!r}, {self._cost.describe(config)}, "
            f"data plane {'; '.join(chosen) or 'not chosen before the first microbatch'}"
            f"{rows_by})"
        )

    def __copy__(self) -> Self:
        """Return the balancer itself: copies of a module share it."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            "a Balancer belongs to running processes and cannot be pickled: save the state_dict() "
            "of a module (its own experts), or the full_state_dict() of a layer (all experts)"
        )

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def config(self) -> BalanceConfig:
        """How to balance. Set it on all ranks: the new config holds from the next microbatch on."""
        return self._config

    @config.setter
    def config(self, config: BalanceConfig) -> None:
        self._config = config
        speeds = self._plan_config.speeds if config.speeds == AUTO else config.speeds
        self._plan_config = replace(config, speeds=speeds)

    @property
    def speeds(self) -> tuple[int, ...]:
        """Speeds that microbatches are planned with, one for each rank; (): equal."""
        return self._plan_config.speeds_for(self.topology.ranks)

    @property
    def measured_speeds(self) -> tuple[int, ...]:
        """Speeds in thousandths of the median rank, as measured last; (): not measured."""
        return () if self._speeds is None else self._speeds.measured

    def rows_to_pay(self, layer: int) -> int | None:
        """Return the rows that one replica in a layer must save to pay; None: not measured."""
        return self._cost.rows_to_pay(layer, self.config.rates)

    def register_layer(self) -> int:
        """Return the number of a new layer; all ranks create their layers in the same order."""
        self._layers += 1
        return self._layers - 1

    @outside_dispatch_modes
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
        gates, tokens: `[T, K]` and `[T, D]`, to be dispatched. Leave them out if you only count and
            plan, or dispatch rows yourself.
        policy: in place of the balancer's, for this microbatch.
        """
        refuse_transforms()
        self._count += 1
        state = self._device(ids.device)
        recomputed = backward_pass() != NO_PASS
        step, microbatch = (self._steps.last if recomputed else self._steps.next)(layer.index)
        passes = Passes(
            layer.index,
            step,
            self.log,
            microbatch=microbatch,
            count=self._count,
            recomputed=recomputed,
            device=ids.device,
        )
        if self._speeds is not None and not passes.record.captured:
            self._compare_speeds(self._speeds, passes, ids.device.type)
        config = self._plan_config
        if policy is not None:
            config = replace(config, policy=running_policy(policy).name)
        shares_slots = max(self._layers, layer.index + 1) > 1
        return state.plane.begin(Inputs(passes, layer, config, ids, gates, tokens, shares_slots))

    def _compare_speeds(self, speeds: Speeds, passes: Passes, device_type: str) -> None:
        """Exchange paces with the other ranks after every block of microbatches; collective."""
        report = speeds.report(passes, device_type)
        if report is None:
            return
        paces = self._host_agreement.gather_numbers(passes.position(At.SPEEDS), report)
        if speeds.gathered(paces):
            self._plan_config = replace(self.config, speeds=speeds.current or None)

    def plane(self, device: torch.device | str) -> DataPlane:
        """Return the data plane for tokens on this device; collective at the first call."""
        return self._device(device).plane

    def _device(self, device: torch.device | str) -> DeviceState:
        if device not in self._devices:
            device = torch.empty(0, device=device).device  # with its index
        if device not in self._devices:
            self._devices[device] = self._make_device(device)
        return self._devices[device]

    def _make_device(self, device: torch.device) -> DeviceState:
        place = Position(At.PLANE, 0, *self._steps.last(0))
        compare_places = partial(self._agreement.compare, place, device)
        request = PlaneRequest(
            self.comm, self.topology, self._joined.links, device, self.settings.peers
        )
        with errors_at(place):
            choice = choose(self.settings.data_plane, request, compare_places)
        context = Context(
            self.comm,
            self.topology,
            self._plan_config,
            self.settings,
            self._agreement,
            self._cost,
        )
        return DeviceState(choice, choice.make(context))

    @property
    def needed(self) -> bool:
        """Whether layers must run the stages: there are other ranks, or subscribers."""
        return self.log.reads_plans

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call a function with the `PassRecord` of every forward and backward pass from now on.

        On a GPU it is called some passes later; `settle` waits. Passes of CUDA graphs are left out,
        and a warning says so at the first capture.
        """
        self.log.subscribe(subscriber)
        self.log.reads_plans, self.log.warn_of_captures = True, self.rank == 0

    def at_state(self, layer: int, device: torch.device) -> None:
        """Raise unless all ranks are about to gather the experts of this layer; collective."""
        self._agreement.compare(Position(At.STATE, layer, *self._steps.last(layer)), device)

    def record_step(self, step: int) -> None:
        """Set the training step of the next microbatches, the same on all ranks.

        Traces, errors and flight files name it. Without it, every microbatch of a layer counts as
        a step.
        """
        self._steps.begin(step)

    def stats(self) -> dict[str, Any]:
        """Return what was planned and moved so far, and the seconds of every stage on this rank.

        A forward pass that backward recomputes counts twice. Waits for a device. There, the seconds
        of all microbatches are extrapolated from the `timed` ones.
        """
        self.settle()
        return self._stats.total().report() | {
            "pool_bytes": sum(state.plane.nbytes for state in self._devices.values()),
            "rates": self._cost.known(),
            "speeds": self.speeds,
            "measured_speeds": self.measured_speeds,
        }

    def summary(self) -> str:
        """Return three lines: imbalance, replicas and time with the policy of this balancer.

        A fourth line says in how many microbatches more slots would help.
        Waits for a device. Bytes and measured times count this rank only.
        """
        self.settle()
        return self._stats.summary(self.config.policy)

    def reset_stats(self) -> None:
        """Set all counters of `stats` and `summary` to zero."""
        self.settle()
        self._stats.reset()

    def settle(self) -> None:
        """Pass all passes so far to the subscribers; waits for the device."""
        self.log.settle()

    def check(self) -> None:
        """Raise errors that a device has recorded and the host has not seen; waits for the device.

        Such errors are a lost rank, more rows than a graph has room for, and invalid ids. Call it
        after the replay of a graph; outside of graphs the next microbatch raises them.
        """
        try:
            for state in self._devices.values():
                state.plane.check()
        except UltraEPError as error:
            if self.flight is not None:
                self.flight.failed(error)
            raise

    def close(self) -> None:
        """Write the rest of the trace; free memory and the resources of the communicator."""
        if self.flight is not None:
            self.flight.close()
        self.settle()
        if self.recorder is not None:
            self.recorder.close()
        for state in self._devices.values():
            state.plane.close()
        if self._hosts is not self.comm:
            self._hosts.close()
        self.comm.close()
