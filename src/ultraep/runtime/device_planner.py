"""DevicePlanner: stages 1, 2 and 4 on the GPU, from ids to routes without the host in between.

Every verb launches a fixed sequence of kernels over buffers that were allocated once. So it returns
at once, a CUDA graph can capture it, and a replay with other ids or loads gives other plans and
routes. Counts and plan are valid until the same verb is called again; slots, order and positions of
routes have their own memory. `read` waits and returns what the host needs in one block.

The verbs do not wait, so the device counts faults: invalid ids, invalid loads, and ids that differ
from the ids of the plan. `check` reads the counts.

Shapes: T tokens, K experts per token, N = T * K routed rows, R ranks, E experts, C replicas at
most, S slots of all ranks, L slots of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ultraep.arrays import frozen
from ultraep.backends import kernels_obstacle
from ultraep.backends.limits import Limits
from ultraep.config import BalanceConfig
from ultraep.errors import BackendUnavailable, ConfigError, LoadError
from ultraep.loads import MAX_TOTAL, invalid_ids
from ultraep.plan import Plan
from ultraep.runtime.device_plan import DevicePlan, DeviceRoutes, Gathered
from ultraep.topology import Topology

POLICIES = ("ultraep", "none")  # that kernels plan
BEHIND = 4  # words behind the loads of a rank: rows without an expert, and its faults


def device_config(config: BalanceConfig) -> BalanceConfig:
    """Return the config, with the policy "ultraep" if kernels do not plan its policy."""
    return config if config.policy in POLICIES else replace(config, policy="ultraep")


class DevicePlanner:
    """Counts, plans and reroutes the microbatches of one rank on its GPU.

    rows: the most routed rows (tokens times choices) of this rank in one microbatch.
    config: with the policy "ultraep" or "none".
    alone: there is one rank, and the host does not read its plan, which has its own loads: it is
        routed by `reroute_alone`.
    device: None: the current GPU, or the CPU with Triton's interpreter.
    `faults`: [3] faults that the device has counted since the last `check`.
    `counts`: [E + 4] loads of this rank, its rows without an expert, and its faults.
    `gathered`: [R, E + 4] memory for those of all ranks; `loads` is a part of it.
    `positions`: [R + 1, 3] memory for the positions of all ranks.
    `received`: [R, L] rows that every rank sends to each slot of this rank, by the last plan.
    """

    def __init__(
        self,
        topology: Topology,
        config: BalanceConfig | None = None,
        *,
        rows: int,
        rank: int = 0,
        alone: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        config = config or BalanceConfig()
        _check_settings(topology, config, rows, rank)
        if obstacle := kernels_obstacle():
            raise BackendUnavailable(obstacle)
        from ultraep.backends.triton.device import default_device, launching
        from ultraep.backends.triton.planner import Planner

        self.topology, self.config, self.rank, self.alone = topology, config, rank, alone
        self.device = torch.empty(0, device=device or default_device()).device
        if self.device.type != default_device().type:
            raise ConfigError(f"kernels run on {default_device().type}, not on {self.device}")
        self._here = partial(launching, self.device)
        limits = Limits.of(topology, config)
        if config.policy == "none":
            limits = limits._replace(max_replicas=0)
        timed = (config.objective, config.policy) == ("time", "ultraep") and topology.can_replicate
        ranks, experts = topology.ranks, topology.experts
        local = int(topology.homes_per_rank[rank]) + topology.slots
        shapes = (ranks + 1, 3), (ranks, experts + BEHIND), (ranks, local)
        sizes = [-(-rows * columns // 4) * 4 for rows, columns in shapes]  # aligned to 16 bytes
        self._planner = Planner(
            limits,
            locality=config.locality,
            device=self.device,
            timed=timed,
            before=sum(sizes),
        )
        block = self.block = self._planner.block  # what the host reads
        self._parts = tuple(zip(sizes, shapes, strict=True))
        self.positions, self.gathered, self.received = self._split(block)[:-1]
        self.loads: torch.Tensor = self.gathered[:, :experts]
        self.counts = self.gathered[0] if ranks == 1 else torch.zeros_like(self.gathered[0])
        self.faults = self.counts[experts + 1 :]
        self._unknown, self._planner.faults, self._mismatches = self.faults.split(1)
        cuda = self.device.type == "cuda"
        self._copy = torch.empty_like(block, device="cpu", pin_memory=cuda)
        self._plan: DevicePlan | None = None
        self._adopted_loads: torch.Tensor | None = None
        self.reserve(rows)

    def _split(self, block: Any) -> list[Any]:
        """Return the parts of the block, as an array or a tensor: the last is the result."""
        parts, end = [], 0
        for size, (rows, columns) in self._parts:
            parts.append(block[end : end + rows * columns].reshape(rows, columns))
            end += size
        return [*parts, block[end:]]

    def reserve(self, rows: int) -> None:
        """Allocate buffers for this many routed rows of this rank."""
        from ultraep.backends.triton.rerouter import Counter, Rerouter

        _check_settings(self.topology, self.config, rows, self.rank)
        self.rows, totals = rows, self.counts[: self.topology.experts + 1]
        self._counter = Counter(self.topology.experts, rows, self.device, totals)
        self._rerouter = Rerouter(self._planner, self._counter)
        self._counter.unknown, self._rerouter.mismatches = self._unknown, self._mismatches

    @property
    def buffers(self) -> object:
        """The memory that the next call of `reserve` would free."""
        return self._counter, self._rerouter

    def refuse(self) -> None:
        """Count no rows, and a fault, in place of invalid ids."""
        self.counts.zero_()
        self._unknown.fill_(1)

    def use(self, config: BalanceConfig) -> bool:
        """Use this config from now on and return True, if only rates or speeds differ.

        A captured graph keeps its rates and speeds.
        """
        if config is not self.config:
            last = self.config
            if replace(config, rates=last.rates, speeds=last.speeds) != last:
                return False
            self.config = config
            limits = Limits.of(self.topology, config)
            self._planner.use(limits.rates, tuple(limits.speeds.tolist()))
        return True

    def count(self, ids: torch.Tensor) -> torch.Tensor:
        """Stage 1: [E] rows of every expert among the `[T, K]` ids; -1 is padding."""
        self._check_ids(ids)
        with self._here():
            self._counter.count(ids)
        return self._counter.totals[:-1]

    def plan(self, loads: torch.Tensor) -> DevicePlan:
        """Stage 2: the plan for the loads `[R, E]` of all ranks."""
        if loads is not self.loads:
            self._check_loads(loads)
        if not self.alone:
            with self._here():
                if self.topology.ranks > 1:
                    self._planner.plan(loads)
                self._rerouter.receive(loads, self.rank, self.received)
        self._plan = self._device_plan(loads.clone() if self.alone else loads)
        return self._plan

    def read(self, pause: Callable[[torch.cuda.Event], None]) -> tuple[Gathered, DevicePlan]:
        """Return what all ranks have gathered, and the last plan, of `loads`, on the host.

        pause: waits for an event of the device.
        """
        self._copy.copy_(self.block, non_blocking=True)
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            pause(event)
        positions, counts, received, result = self._split(self._copy.numpy().astype(np.int64))
        loads = frozen(counts[:, : self.topology.experts].copy())
        plan = replace(self._last_plan(), fetched=(loads, result))
        return Gathered(positions, counts, received), plan

    def adopt(self, plan: Plan) -> DevicePlan:
        """Use a plan that was made elsewhere, by any policy, as the last plan."""
        if plan.topology != self.topology or not plan.within_limits:
            raise ConfigError(f"{plan} does not fit {self.topology}")
        p, topology = self._planner, self.topology
        slots = topology.spare_slot(plan.replicas[:, 1], plan.replicas[:, 2])
        number = np.array([plan.num_replicas])
        columns = (number, plan.rank_loads, plan.quotas, plan.replicas, slots, plan.split)
        p.result.zero_()
        p.plan_tensors.replicas.fill_(-1)
        p.plan_tensors.slot_of_replica.fill_(-1)
        for (place, _), values in zip(p.places.values(), columns, strict=False):
            p.result[place][: values.size].copy_(
                torch.from_numpy(values.reshape(-1).astype(np.int32))
            )
        held = np.full(len(p.expert_of_slot), -1)
        held[topology.home_slot_of_expert] = np.arange(topology.experts)
        held[slots] = plan.replicas[:, 0]
        p.expert_of_slot.copy_(torch.from_numpy(held))
        if self._adopted_loads is None:  # allocated once, because graphs read it again
            self._adopted_loads = torch.zeros(plan.loads.shape, dtype=torch.int64).to(self.device)
        self._adopted_loads.copy_(torch.from_numpy(plan.loads.copy()))
        self._plan = replace(self._device_plan(self._adopted_loads), config=plan.config)
        with self._here():
            self._rerouter.receive(self._plan.loads, self.rank, self.received)
        return self._plan

    def reroute(self, ids: torch.Tensor, *, counted: bool = False) -> DeviceRoutes:
        """Stage 4: a slot for each of the ids, by the last plan.

        counted: the last call of `count` had these ids, so skip counting.
        """
        plan, rows = self._last_plan(), ids.numel()
        if not counted:
            self.count(ids)
        padded = -(-rows // 4) * 4
        piece = torch.empty(3 * padded, dtype=torch.int32, device=self.device)
        slots, order, positions = piece.view(3, padded)[:, :rows]
        slots = slots.view(ids.shape)
        with self._here():
            self._rerouter.lines(plan.loads, self.rank)
            self._rerouter.assign(ids, slots, order, positions)
        r, received = self._rerouter, self.received.clone()
        return DeviceRoutes(slots, positions, order, r.rows_of_slot, r.send_counts, received)

    def reroute_alone(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Stage 4 of a rank alone, for the ids that were counted last.

        Returns [T, K] slots, [S + 1] the first row of every slot, [N] the rows in the order of the
        slots, and [N] the position of every row there; -1: padding.
        """
        slots = torch.empty(ids.shape, dtype=torch.int32, device=self.device)
        even = ids.numel() + ids.numel() % 2  # aligned to 16 bytes
        piece = torch.empty(2, even, dtype=torch.int64, device=self.device)
        order, positions = piece[:, : ids.numel()]
        with self._here():
            first_row = self._rerouter.lines(self._last_plan().loads, self.rank, kept=True)
            self._rerouter.assign(ids, slots, order, positions)
        return slots, first_row, order, positions

    def check(self) -> None:
        """Raise faults that the device has counted since the last check; waits for it."""
        counts = self.faults.tolist()
        self.faults.zero_()
        meanings = {
            "stage 'loads'": f"ids must lie in 0..{self.topology.experts - 1}",
            "stage 'plan'": f"loads are negative, or add up to more than {MAX_TOTAL}",
            "stage 'reroute'": "experts have another number of rows than in the plan",
        }
        faults = {
            stage: f"{number} {meaning} ({stage})"
            for number, (stage, meaning) in zip(counts, meanings.items(), strict=True)
            if number
        }
        if faults:
            text = f"since the last check on rank {self.rank}: {'; '.join(faults.values())}"
            raise LoadError(text, ranks=[self.rank], place=next(iter(faults)))

    def _device_plan(self, loads: torch.Tensor) -> DevicePlan:
        p = self._planner
        return DevicePlan(self.topology, self.config, loads, p.expert_of_slot, p.result, p.places)

    def _last_plan(self) -> DevicePlan:
        if self._plan is None:
            raise LoadError("call plan() before reroute()")
        return self._plan

    def _check_ids(self, ids: torch.Tensor) -> None:
        if error := invalid_ids(ids):
            raise error
        if ids.device != self.device:
            raise LoadError(f"ids must be on {self.device}, got {ids.device}")
        if not ids.is_contiguous():
            raise LoadError(
                f"ids must be contiguous: shape {list(ids.shape)}, strides {list(ids.stride())}"
            )
        if ids.numel() > self.rows:
            raise LoadError(
                f"{ids.numel()} routed rows, but the buffers are for {self.rows}; pass a "
                "larger rows="
            )

    def _check_loads(self, loads: torch.Tensor) -> None:
        expected = (self.topology.ranks, self.topology.experts)
        if tuple(loads.shape) != expected:
            raise LoadError(
                f"loads must be [ranks, experts] = {list(expected)}, got {list(loads.shape)}"
            )
        if loads.dtype not in (torch.int32, torch.int64):
            raise LoadError(f"loads must be int32 or int64, got {loads.dtype}")
        if loads.stride(1) != 1:
            raise LoadError(f"the rows of loads must be contiguous, got strides {loads.stride()}")
        if loads.device != self.device:
            raise LoadError(f"loads must be on {self.device}, got {loads.device}")


def _check_settings(topology: Topology, config: BalanceConfig, rows: int, rank: int) -> None:
    """Raise if the GPU cannot work with these settings, before memory is allocated."""
    if config.policy not in POLICIES:
        raise ConfigError(
            f"policy {config.policy!r} cannot run on the GPU; choose from {', '.join(POLICIES)}"
        )
    if not 0 <= rank < topology.ranks:
        raise ConfigError(f"rank must lie in 0..{topology.ranks - 1}, got {rank}")
    if not 0 <= rows <= MAX_TOTAL // topology.ranks:
        raise ConfigError(
            f"rows must lie in 0..{MAX_TOTAL // topology.ranks}, so that {topology.ranks} "
            f"ranks count no more than {MAX_TOTAL}, got {rows}"
        )
