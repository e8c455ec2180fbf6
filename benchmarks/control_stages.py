"""The stages that bench_control.py times, and the twin that does the same on the CPU.

Shapes: T tokens of a rank, K experts per token, R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from harness import Mismatch, Parts
from load_cases import SHUFFLED, Kind

import ultraep
from ultraep import BalanceConfig, Plan, Rates, Topology
from ultraep.arrays import PADDING, IntArray
from ultraep.backends import select
from ultraep.policies import Problem, get_policy
from ultraep.reroute import Routes, reroute, reroute_dense, rows_received
from ultraep.runtime.control import ControlPlane, DevicePlan, DeviceRoutes

USUAL = Kind(SHUFFLED, 3.0)
WHOLE = "counts to routes"
VERBS = ("count", "plan", "reroute")
KERNELS = ("count", "sum", "place", "split", "lines", "assign", "receive")
STAGES = ("count", "sum", "place", "split", "plan", "lines", "assign", "receive", "reroute", WHOLE)
MAP = "map"  # instead of ids: a bool map of tokens and experts
RATES = Rates(row=100_000, copy=200_000_000, each=1_000_000, layer=5_000_000)  # of a large layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a control plane is made for, and the microbatches that it gets."""

    ranks: int
    experts: int
    slots: int = 1
    domain: int | None = None
    tolerance: float = 0.0
    objective: str = "balance"
    ids: str = "int64"
    kind: Kind = USUAL

    @property
    def topology(self) -> Topology:
        return Topology(
            ranks=self.ranks, experts=self.experts, slots=self.slots, domain=self.domain
        )

    @property
    def config(self) -> BalanceConfig:
        return BalanceConfig(tolerance=self.tolerance, objective=self.objective, rates=RATES)

    @property
    def case(self) -> Parts:
        return {
            "ranks": self.ranks,
            "experts": self.experts,
            "slots": self.slots,
            "domain": self.domain or self.ranks,
            "tolerance": self.tolerance,
            "objective": self.objective,
            "load": self.kind.name,
            "ids": self.ids,
        }


@dataclass(frozen=True, slots=True)
class Batch:
    """A microbatch on the host, and what the twin makes of it."""

    loads: IntArray  # [R, E]
    choices: torch.Tensor  # of rank 0: [T, K] ids, or a [T, E] map
    probabilities: torch.Tensor  # [T, E], of a map
    plan: Plan
    routes: Routes | tuple[torch.Tensor, torch.Tensor]

    @property
    def rows(self) -> int:
        """What a control plane must have room for."""
        return len(self.choices) if self.is_map else self.choices.numel()

    @property
    def is_map(self) -> bool:
        return self.choices.dtype == torch.bool


def draw(setting: Setting, tokens: int, seed: int) -> Batch:
    """Loads of all ranks, and choices of rank 0 that add up to its row of them."""
    loads = setting.kind.draw(setting.ranks, setting.experts, tokens=tokens, seed=seed)
    plan = ultraep.plan(loads, setting.topology, setting.config, backend="cpu")
    rng = np.random.default_rng(seed)
    if setting.ids == MAP:
        chosen = np.zeros((tokens, setting.experts), dtype=np.bool_)
        for expert, rows in enumerate(loads[0]):
            chosen[rng.permutation(tokens)[:rows], expert] = True
        choices = torch.from_numpy(chosen)
        weights = torch.from_numpy(rng.random(chosen.shape, dtype=np.float32))
        mapped = reroute_dense(choices, weights, plan, 0, backend="cpu")
        return Batch(loads, choices, weights, plan, mapped)
    ids = rng.permutation(np.repeat(np.arange(setting.experts), loads[0])).reshape(tokens, -1)
    choices = torch.from_numpy(ids).to(getattr(torch, setting.ids))
    routes = reroute(choices, plan, 0, backend="cpu")
    return Batch(loads, choices, torch.empty(0), plan, routes)


def same_plan(got: Plan, want: Plan) -> bool:
    return got.digest() == want.digest() and np.array_equal(got.rank_loads, want.rank_loads)


def same_routes(got: DeviceRoutes, want: Routes) -> bool:
    """Whether every part of them is equal, and nothing stands behind the last row."""
    order, rows = got.order.cpu().long(), len(want.order)
    positions = torch.full((want.num_rows,), PADDING)
    positions[want.order] = torch.arange(rows)
    return (
        torch.equal(got.slots.cpu().long(), want.slots)
        and torch.equal(order[:rows], want.order)
        and bool((order[rows:] == PADDING).all())
        and torch.equal(got.positions.cpu().long(), positions)
        and np.array_equal(got.rows_of_slot.cpu().numpy(), want.rows_of_slot)
        and got.send_counts.tolist() == want.send_counts
        and np.array_equal(got.receive_counts.cpu().numpy(), want.receive_counts)
    )


@dataclass(slots=True)
class Tally:
    """Comparisons with the twin that were made in the settings that are timed."""

    plans: int = 0
    routes: int = 0


class Rig:
    """A control plane of rank 0, and the tensors that its kernels read: `put` changes them."""

    def __init__(self, setting: Setting, batch: Batch, tally: Tally) -> None:
        self.setting, self.tally = setting, tally
        self.control = ControlPlane(setting.topology, setting.config, rows=batch.rows)
        device = self.control.device
        self.loads = torch.from_numpy(batch.loads).to(device, torch.int32)
        self.choices = batch.choices.to(device, copy=True)
        self.probabilities = batch.probabilities.to(device, copy=True)

    def put(self, batch: Batch) -> None:
        """Other loads and choices, in the same place."""
        self.loads.copy_(torch.from_numpy(batch.loads))
        self.choices.copy_(batch.choices)
        self.probabilities.copy_(batch.probabilities)

    def count(self) -> torch.Tensor:
        is_map = self.setting.ids == MAP
        return (self.control.count_map if is_map else self.control.count)(self.choices)

    def plan(self) -> DevicePlan:
        return self.control.plan(self.loads)

    def reroute(self) -> object:
        """Nothing is counted again."""
        if self.setting.ids == MAP:
            return self.control.reroute_map(self.choices, self.probabilities, counted=True)
        return self.control.reroute(self.choices, counted=True)

    def all(self) -> object:
        """What lies between the router and dispatch, but for the message with the counts."""
        self.count()
        self.plan()
        return self.reroute()

    @property
    def routes(self) -> DeviceRoutes:
        """The routes of ids, whoever launched the kernels that wrote them."""
        control, rerouter = self.control, self.control._rerouter
        return DeviceRoutes(
            control._slots.view(self.choices.shape),
            control._positions,
            control._order,
            rerouter.rows_of_slot,
            rerouter.send_counts,
            control._received,
        )

    def check(self, batch: Batch, result: object) -> None:
        """Raise unless what stands on the device is what the twin says; `result`: of a map."""
        self.control.check()
        counts = self.control._counter.totals[:-1].cpu().numpy()
        if not np.array_equal(counts, batch.loads[0]):
            raise Mismatch(f"the counts of {self.setting}")
        if not same_plan(self.control._last_plan().to_host(), batch.plan):
            raise Mismatch(f"the plan of {self.setting}")
        self.tally.plans += 1
        if isinstance(batch.routes, Routes):
            same = same_routes(self.routes, batch.routes)
        else:
            assert isinstance(result, tuple)
            pairs = zip(result, batch.routes, strict=True)
            same = all(torch.equal(got.cpu(), want) for got, want in pairs)
        if not same:
            raise Mismatch(f"the routes of {self.setting}")
        self.tally.routes += 1


@dataclass(frozen=True, slots=True)
class Stage:
    """Something to be timed: how it is launched, how the twin does it, and the bytes it moves."""

    name: str
    call: Callable[[], Any]
    twin: Callable[[], object] | None = None
    moved: int | None = None


def stages(rig: Rig, batch: Batch, names: Iterable[str]) -> list[Stage]:
    """The stages of these names, in the order of `STAGES`."""
    every = _map_stages if batch.is_map else _ids_stages
    found = {stage.name: stage for stage in every(rig, batch)}
    return [found[name] for name in STAGES if name in names]


def _ids_stages(rig: Rig, batch: Batch) -> list[Stage]:
    control, loads, ids, routes = rig.control, rig.loads, rig.choices, rig.routes
    planner, rerouter = control._planner, control._rerouter
    totals, result, received = control._counter.totals, planner.result, routes.receive_counts
    slots, order, positions = routes.slots, routes.order, routes.positions
    routed = _bytes(slots, order, positions)
    columns = 4 * batch.plan.num_replicas * planner.ranks  # of the loads: those of copied experts
    count, plan, assign, sum_up, place, split = _twins(rig.setting, batch)
    receive = partial(rows_received, batch.plan, 0)
    routing = partial(rerouter.assign, ids, slots, order, positions)
    receiving = partial(rerouter.receive, loads, 0, received)

    def whole() -> object:
        count()
        return reroute(batch.choices, plan(), 0, backend="cpu")

    return [
        Stage("count", rig.count, count, _bytes(ids, totals)),
        Stage("sum", partial(planner.sum, loads), sum_up, _bytes(loads, planner.expert_loads)),
        Stage("place", planner.place, place),
        Stage("split", partial(planner.lay_out, loads), split, columns + _bytes(result)),
        Stage("plan", rig.plan, plan, _bytes(loads, result)),
        Stage("lines", partial(rerouter.lines, loads, 0)),
        Stage("assign", routing, moved=_bytes(ids) + routed),
        Stage("receive", receiving, receive, 2 * _bytes(received)),
        Stage("reroute", rig.reroute, assign, _bytes(ids) + routed + 2 * _bytes(received)),
        Stage(WHOLE, rig.all, whole, _bytes(ids, totals, loads, result, received) + routed),
    ]


def _map_stages(rig: Rig, batch: Batch) -> list[Stage]:
    control, loads, chosen = rig.control, rig.loads, rig.choices
    totals, result = control._counter.totals, control._planner.result
    plan = partial(ultraep.plan, batch.loads, batch.plan.topology, batch.plan.config, backend="cpu")
    mapped = _bytes(chosen, rig.probabilities) + (
        sum(_bytes(part) for part in batch.routes) if isinstance(batch.routes, tuple) else 0
    )
    to_map = partial(reroute_dense, batch.choices, batch.probabilities, rank=0, backend="cpu")
    return [
        Stage("count", rig.count, partial(batch.choices.sum, dim=0), _bytes(chosen, totals)),
        Stage("plan", rig.plan, plan, _bytes(loads, result)),
        Stage("reroute", rig.reroute, lambda: to_map(plan=batch.plan), mapped),
        Stage(
            WHOLE,
            rig.all,
            lambda: (batch.choices.sum(dim=0), to_map(plan=plan())),
            mapped + _bytes(totals, loads, result),
        ),
    ]


def _twins(setting: Setting, batch: Batch) -> tuple[Callable[[], Any], ...]:
    """Count, plan and reroute on the CPU; and the parts of plan: sum, place, split."""
    topology, config, engine = setting.topology, setting.config, select("cpu")
    totals = batch.loads.sum(axis=0)
    problem = Problem(batch.loads, totals, topology, config, engine, None)
    place = partial(get_policy(config.policy).decide, problem)
    homes = topology.home_of_expert
    return (
        partial(ultraep.count_loads, batch.choices, setting.experts, backend="cpu"),
        partial(ultraep.plan, batch.loads, topology, config, backend="cpu"),
        partial(reroute, batch.choices, batch.plan, 0, backend="cpu"),
        partial(batch.loads.sum, axis=0),
        place,
        partial(engine.split, batch.loads, homes, place(), config.locality),
    )


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
