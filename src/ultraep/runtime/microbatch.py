"""BaseMicrobatch: what the microbatches of all data planes share.

The verbs check their order, are observed as stages, and measure rates where a plan needs them. A
data plane implements four methods of its own: `_count`, `_make_plan`, `_replicas` and `_rows`.

Shapes: T tokens, R ranks, E experts, A arrived rows, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from ultraep.bundle import Bundle
from ultraep.combine import combine
from ultraep.comm import Communicator
from ultraep.config import BalanceConfig
from ultraep.dispatch import Arrivals, Exchange, Rows, dispatch
from ultraep.errors import ConfigError
from ultraep.microbatch import AnyPlan, Inputs, Replicas
from ultraep.ops.modes import unseen
from ultraep.plan import Plan
from ultraep.runtime.agreement import Agreement, Place, Point
from ultraep.runtime.observe import ObservedExchange, Observers, staged
from ultraep.runtime.pricing import Pricing
from ultraep.runtime.settings import Settings
from ultraep.runtime.versions import Versions
from ultraep.topology import Topology

AnyPlanT = TypeVar("AnyPlanT", bound=AnyPlan)
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Shared:
    """What a balancer shares with its data planes."""

    comm: Communicator
    topology: Topology
    config: BalanceConfig
    settings: Settings
    agreement: Agreement
    versions: Versions
    pricing: Pricing
    observers: Observers


class BaseMicrobatch(ABC, Generic[AnyPlanT]):
    """One microbatch of one rank; see `ultraep.microbatch.Microbatch`."""

    def __init__(self, inputs: Inputs, shared: Shared) -> None:
        self.info, self.observers = inputs.info, shared.observers
        self._inputs, self._shared = inputs, shared
        self._loads: torch.Tensor | None = None
        self._plan: AnyPlanT | None = None
        self._exchange: Exchange | None = None

    @unseen()
    @staged("loads")
    def count(self) -> torch.Tensor:
        """Stage 1: [R, E] the exact loads of all ranks, where the ids are; collective."""
        self._loads = self._count()
        return self._loads

    @unseen()
    def plan(self) -> AnyPlanT:
        """Stage 2: the plan, which is the same on every rank."""
        self._known(self._loads, "count")
        pricing = self._shared.pricing
        if pricing.lacks_rates(self._inputs):
            with self.observers.silenced():
                pricing.measure(self._inputs, self._trial)
        config = pricing.config_for(self._inputs, self._rows_of_all())
        plan = self._plan = self._make_plan(config)
        self.observers.planned(self.info, plan)
        if self._shared.settings.verify:
            self._verify(plan)
        return plan

    def replicate(self) -> Replicas:
        """Stage 3: the replicas of the plan, for a `with` block."""
        return self._replicas(self._known(self._plan, "plan"))

    @unseen()
    @staged("reroute")
    def reroute(self) -> Exchange:
        """Stage 4: a slot for every routed row of this rank."""
        rows, at_backward = self._rows(self._known(self._plan, "plan"))
        self._exchange = ObservedExchange(rows, self.info, self.observers, at_backward)
        return self._exchange

    def dispatch(self) -> Arrivals:
        """Stage 5: the rows that the slots of this rank serve."""
        inputs, exchange = self._inputs, self._known(self._exchange, "reroute")
        if inputs.tokens is None or inputs.gates is None:
            raise ConfigError("dispatch() needs tokens and gates: pass both to Balancer.begin")
        return dispatch(inputs.tokens, inputs.gates, exchange, inputs.layer.pack)

    def combine(self, outputs_AD: torch.Tensor) -> torch.Tensor:
        """Stage 7: [T, D] the outputs of the tokens of this rank."""
        return combine(outputs_AD, self._known(self._exchange, "reroute"))

    def _known(self, value: T | None, verb: str) -> T:
        if value is None:
            raise ConfigError(
                f"call {verb}() before: the verbs of a microbatch are count, plan, replicate, "
                "reroute, dispatch, combine, in this order"
            )
        return value

    def _place(self, point: Point) -> Place:
        return Place(point, self.info.layer, self.info.step)

    @abstractmethod
    def _count(self) -> torch.Tensor:
        """[R, E] the loads of all ranks."""

    @abstractmethod
    def _rows_of_all(self) -> int:
        """Routed rows of all ranks, the same number on every host; an upper bound is enough."""

    @abstractmethod
    def _make_plan(self, config: BalanceConfig) -> AnyPlanT:
        """The plan for the loads that were counted: the stage `plan`."""

    @staged("verify")
    def _verify(self, plan: AnyPlanT) -> None:
        """Raise if ranks have different plans."""

    @abstractmethod
    def _replicas(self, plan: AnyPlanT) -> Replicas:
        """The replicas of the plan."""

    @abstractmethod
    def _trial(self, plan: Plan, bundle: Bundle, number: int) -> Replicas:
        """Replicas of a synthetic plan, to be timed; none with that number were sent before."""

    @abstractmethod
    def _rows(self, plan: AnyPlanT) -> tuple[Rows, Callable[[], None]]:
        """What moves the rows, and what to call when backward begins."""
