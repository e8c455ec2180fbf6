"""Buffers and launches of stage 2 on the GPU: from loads to replicas and their sources.

Shapes: R ranks, E experts, D domains, C replicas at most, S slots of all ranks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ultraep.arrays import IntArray
from ultraep.backends.limits import Limits
from ultraep.backends.triton.kernels import by_time, place, search, state
from ultraep.backends.triton.kernels.by_time import LIMITED
from ultraep.backends.triton.kernels.plan import Homes, Plan
from ultraep.backends.triton.kernels.search import PlanOut
from ultraep.backends.triton.launch import cdiv, power_of_2, quick
from ultraep.config import NO_RATES, PARTS, tolerances_by_time
from ultraep.errors import ConfigError

INT = torch.int32
BEFORE = int(state.BEFORE_SPEEDS.value)
MAX_TILE = 1 << 14  # padded home experts times padded ranks of a domain, in one program


class Planner:
    """Plans for one topology and one set of limits, in buffers that are allocated once.

    `plan` always launches the same kernels, so that a graph can capture it. The next call
    overwrites the results; rows behind the last replica are -1 or 0.
    `places`: slice and shape of each result in `result`.
    timed: whether `use` may set rates later, though `limits` has none.
    before: words of `block` before the results, a multiple of four.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        locality: bool,
        device: torch.device,
        timed: bool = False,
        before: int = 0,
    ) -> None:
        experts_by_rank, first_of_rank, domain, slots = limits[:4]
        self.ranks, self.experts = len(first_of_rank) - 1, len(experts_by_rank)
        self.domain, self.slots, self.locality = domain, slots, locality
        self.domains = self.ranks // domain
        self.limit = min(limits.max_replicas, domain * slots)
        self.min_tokens = min(limits.min_tokens, 2**31 - 1)
        self.parts = limits.tolerance_parts
        self.loose = self.parts > 0 or self.domains > 1
        may_be_timed = timed or limits.rates != NO_RATES
        tolerances = [self.parts] * LIMITED.value + tolerances_by_time(self.parts)
        self.num_attempts = len(tolerances) if may_be_timed else 0
        self.homes = max(1, int(np.diff(first_of_rank).max()))
        self.max_fanout = domain  # most replicas of one expert, also in an adopted plan
        self._pad()
        self._tables(experts_by_rank, first_of_rank, device)
        self._allocate(device, before)
        self.tolerances = torch.tensor(tolerances, dtype=INT, device=device)
        self._known: dict[tuple[int, ...], torch.Tensor] = {}
        self._known_speeds: dict[tuple[int, ...], torch.Tensor] = {}
        self.use(limits.rates, tuple(limits.speeds.tolist()))

    def use(self, rates: tuple[int, int, int, int], speeds: tuple[int, ...] = ()) -> None:
        """Plan with these rates and speeds from now on; captured graphs keep theirs.

        speeds: of all ranks; (): equal.
        """
        self.rates, self.timed = self.on_device(rates), self.num_attempts > 0 and rates != NO_RATES
        self.speeds = self._speed_table(speeds)[BEFORE:] if speeds else None
        self.shape = self._shape._replace(SPEEDS=bool(speeds))
        self.tried = self._wide_tried if speeds else self._tried
        # Arguments that both kernels take, in their order.
        self.settings = (
            *(self.domains, self.domain, self.slots, self.min_tokens, self.limit),
            self.speeds,
        )

    def _speed_table(self, speeds: tuple[int, ...]) -> torch.Tensor:
        """Return the buffer of these speeds, as in `kernels/state.py`."""
        known = self._known_speeds.get(speeds)
        if known is not None:
            return known
        unit = math.gcd(PARTS, *speeds)
        period, most = PARTS // unit, max(speeds) // unit
        header = 0, period, unit, self.domain * most
        numbers = self.on_device((*header, *speeds))
        speed_R1 = numbers[BEFORE:, None] // unit
        rows_M = torch.arange(1, most + 1, device=numbers.device)
        # The least threshold at which the limit of a rank is this many rows.
        step_RM = (rows_M * period + speed_R1 - 1) // speed_R1
        step_RM.masked_fill_(rows_M > speed_R1, PARTS + 1)  # in the next period
        sum_D = speed_R1.view(self.domains, -1).sum(1)
        step_DS = step_RM.view(self.domains, -1).sort().values
        table = torch.cat((numbers, sum_D, step_DS.flatten()))
        if not self._capturing():
            self._known_speeds[speeds] = table
        return table

    def _capturing(self) -> bool:
        return self.home.is_cuda and torch.cuda.is_current_stream_capturing()

    def on_device(self, numbers: tuple[int, ...]) -> torch.Tensor:
        """Return 64-bit numbers on the device, without a copy from the host."""
        known = self._known.get(numbers)
        if known is None:
            known = torch.empty(len(numbers), dtype=torch.int64, device=self.home.device)
            for index, number in enumerate(numbers):
                known[index].fill_(number)
            if not self._capturing():
                self._known[numbers] = known  # a captured fill runs only at replay
        return known

    def _pad(self) -> None:
        power = power_of_2
        self.H, self.G, self.R = power(self.homes), power(self.domain), power(self.ranks)
        self.held = self.domain * self.slots
        self.C = power(max(1, self.ranks * self.slots))
        tile = self.H * self.G
        if tile > MAX_TILE:
            raise ConfigError(
                f"a domain of {self.domain} ranks with up to {self.homes} home experts needs a "
                f"tile of {tile}, but the GPU planner holds {MAX_TILE}; use smaller domains"
            )
        # One warp while a thread holds few experts: several warps synchronise at every step.
        self.warps = min(8, max(1, tile // 512))
        self.buffers = max(1, self.num_attempts) + 3
        self.step = max(1, min(16, tile, 2048 * self.warps // tile))
        # Domains whose rows a program loads together.
        self.step_over_domains = power(min(self.domains, max(1, 2048 // tile)))
        held, one_slot = power(max(1, self.held)), self.slots == 1
        self._shape = state.Shape(self.H, self.G, held, one_slot, self.buffers)

    def _tables(
        self, experts_by_rank: IntArray, first_of_rank: IntArray, device: torch.device
    ) -> None:
        """Allocate the tables of homes and slots."""
        ranks = np.repeat(np.arange(self.ranks), np.diff(first_of_rank))
        row = np.arange(self.experts) - first_of_rank[ranks]
        places = ((ranks // self.domain) * self.H + row) * self.G + ranks % self.domain
        first_slot = first_of_rank + np.arange(self.ranks + 1) * self.slots
        self.num_slots = int(first_slot[-1])
        home_slots = np.arange(self.experts) + self.slots * ranks

        def table(size: int, at: Any, values: Any) -> torch.Tensor:
            filled = np.full(size, -1)
            filled[at] = values
            return torch.from_numpy(filled).to(device, INT)

        experts = np.asarray(experts_by_rank)
        padded = self.domains * self.H * self.G
        self.place_of_expert = table(self.experts, experts, places)
        self.expert_of_place = table(padded, places, experts)
        self.home = table(padded, [], [])  # rows of every expert at its home
        self.home_tables = Homes(
            home_of_expert=table(self.experts, experts, ranks),
            home_slot_of_expert=table(self.experts, experts, home_slots),
            first_slot_of_rank=table(self.ranks + 1, slice(None), first_slot),
            expert_of_slot=table(self.num_slots, home_slots, experts),  # spare slots change
        )

    def _allocate(self, device: torch.device, before: int) -> None:
        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=INT, device=device)

        max_replicas = max(1, self.ranks * self.slots)  # at least one row, unused without slots
        self.expert_loads = numbers(self.experts)
        self._tried = state.Attempts(
            attempts=numbers(self.domains, self.buffers, 2, max(1, self.held)),
            attempt_loads=numbers(self.domains, self.buffers, self.domain),
            outcomes=numbers(self.domains, self.num_attempts, by_time.OUTCOMES.value),
            scratch=numbers(self.domains, state.scratch_size(self.H, self.G)),
        )
        self._wide_tried = self._tried._replace(  # with speeds
            outcomes=self._tried.outcomes.long(), scratch=self._tried.scratch.long()
        )
        self.finished = numbers(1)  # programs of a launch
        self.counts = numbers(self.domains, self.H * self.G)
        self.placed = torch.full((2, max_replicas), 2**31 - 1, dtype=INT, device=device)
        self.faults = numbers(1)  # loads that are negative or too large
        # All results are in one piece of memory, which one copy takes to the host.
        shapes = {
            "num_replicas": (1,),
            "rank_loads": (self.ranks,),
            "quotas": (max_replicas,),
            "replicas": (max_replicas, 3),
            "slot_of_replica": (max_replicas,),
            "split": (max_replicas, self.ranks),
        }
        self.places, end = {}, 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            self.places[name] = slice(end, end + size), shape
            end += cdiv(size, 4) * 4  # aligned to 16 bytes
        self.block = numbers(before + end)
        self.result = self.block[before:]
        results = {name: self.result[at].view(shape) for name, (at, shape) in self.places.items()}
        self.rank_loads = results.pop("rank_loads")
        self.plan_tensors = Plan(**results)
        self.plan_tensors.replicas.fill_(-1)
        self.plan_tensors.slot_of_replica.fill_(-1)
        self.expert_of_slot = self.home_tables.expert_of_slot
        self._plan_out = PlanOut(
            self.placed,
            self.rank_loads,
            self.expert_of_slot,
            self.expert_of_place,
            self.home_tables.first_slot_of_rank,
        )

    def plan(self, loads_RE: torch.Tensor) -> None:
        """Launch all kernels; the plan is then in the buffers."""
        self.sum(loads_RE)
        self.place()
        self.lay_out(loads_RE)

    def sum(self, loads_RE: torch.Tensor) -> None:
        """Sum the rows of every expert."""
        columns = 32
        quick(place.sum_loads)[(cdiv(self.experts, columns),)](
            loads_RE,
            self.place_of_expert,
            self.expert_loads,
            self.home,
            self.faults,
            len(loads_RE),
            self.experts,
            loads_RE.stride(0),
            BR=min(self.R, 64),
            BE=columns,
            num_warps=4,
        )

    def place(self) -> None:
        """Place the replicas of every domain, and sum what every rank serves."""
        if self.timed:
            self._plan_by_time()
        else:
            self._search()

    def _plan_by_time(self) -> None:
        quick(by_time.plan_by_time)[(self.domains, self.num_attempts)](
            self.home,
            self.counts,
            self.tolerances,
            self.rates,
            self.tried,
            self.finished,
            self._plan_out,
            *self.settings,
            SHAPE=self.shape,
            PADDED=power_of_2(self.num_attempts),
            STEP=self.step_over_domains,
            SEARCH_STEP=self.step,
            num_warps=self.warps,
        )

    def _search(self) -> None:
        quick(search.search)[(self.domains,)](
            self.home,
            self.tried,
            self._plan_out,
            *self.settings,
            self.parts,
            LOOSE=self.loose,
            SHAPE=self.shape,
            STEP=self.step_over_domains,
            SEARCH_STEP=self.step,
            num_warps=self.warps,
        )

    def lay_out(self, loads_RE: torch.Tensor) -> None:
        """Write the replicas with slots and quotas, and their rows from every source."""
        if not self.slots:
            return
        quick(place.split)[(len(self.plan_tensors.quotas),)](
            loads_RE,
            self.expert_loads,
            self.placed,
            self.home_tables,
            self.plan_tensors,
            self.ranks,
            loads_RE.stride(0),
            SLOTS=self.slots,
            LOCALITY=self.locality,
            C=self.C,
            R=self.R,
            num_warps=min(8, max(1, max(self.R, self.C) // 128)),
        )
