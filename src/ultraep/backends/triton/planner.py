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
from ultraep.backends.reference.members import MOST_RANKS
from ultraep.backends.triton.kernels import groups, place, rungs, state
from ultraep.backends.triton.kernels.plan import Homes, Plan
from ultraep.backends.triton.kernels.rungs import LIMITED
from ultraep.backends.triton.kernels.search import PlanOut
from ultraep.backends.triton.launch import cdiv, power_of_2, quick
from ultraep.config import NO_RATES, rungs_of
from ultraep.errors import ConfigError

INT = torch.int32
MAX_TILE = 1 << 14  # padded home experts times padded ranks of a domain, in one program


class Planner:
    """Plans for one topology and one set of limits, in buffers that are allocated once.

    `plan` always launches the same kernels, so that a graph can capture it. Results are in tensors
    that the next call overwrites; rows behind the last replica are -1 or 0.
    `places`: slice and shape of each result in `result`.
    limits: rates may change between plans, see `use`.
    timed: whether rates may be set later, though `limits` has none.
    """

    num_replicas: torch.Tensor
    rank_loads: torch.Tensor
    quotas: torch.Tensor
    replicas: torch.Tensor
    slot_of_copy: torch.Tensor
    split: torch.Tensor
    places: dict[str, tuple[slice, tuple[int, ...]]]

    def __init__(
        self, limits: Limits, *, locality: bool, device: torch.device, timed: bool = False
    ) -> None:
        experts_by_rank, first_of_rank, domain, slots = limits[:4]
        self.ranks, self.experts = len(first_of_rank) - 1, len(experts_by_rank)
        self.domain, self.slots, self.locality = domain, slots, locality
        self.domains = self.ranks // domain
        self.limit = min(limits.max_replicas, domain * slots)
        self.min_tokens = min(limits.min_tokens, 2**31 - 1)
        self.parts = limits.tolerance_parts
        self.slack = self.parts > 0 or self.domains > 1
        may_be_timed = timed or limits.rates != NO_RATES
        tolerances = [self.parts] * LIMITED.value + rungs_of(self.parts)
        self.tried = len(tolerances) if may_be_timed else 0
        self.homes = max(1, int(np.diff(first_of_rank).max()))
        self.max_fanout = domain  # independent of the limit: a plan may come from elsewhere
        self._pad()
        self._tables(experts_by_rank, first_of_rank, device)
        self._allocate(device)
        self.tolerances = torch.tensor(tolerances, dtype=INT, device=device)
        self.timed = limits.rates != NO_RATES
        self.rates = torch.tensor(limits.rates, dtype=torch.int64, device=device)
        self._rates = {limits.rates: self.rates}

    def use(self, rates: tuple[int, int, int, int]) -> None:
        """Plan with these rates from now on. Captured graphs keep the rates of their capture."""
        known = self._rates.get(rates)
        if known is None:
            known = torch.empty(len(rates), dtype=torch.int64, device=self.rates.device)
            for index, number in enumerate(rates):
                known[index].fill_(number)
            if not (known.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._rates[rates] = (
                    known  # a captured fill runs at replay: do not share its tensor
                )
        self.rates, self.timed = known, self.tried > 0 and rates != NO_RATES

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
        self.by_groups = self.G >= 256
        self.in_circles = self.slack and self.domain <= MOST_RANKS
        self.members = 1 + self.slack + self.in_circles * state.VARIANTS.value
        self.buffers = max(self.members, self.tried) + 3
        # `close_circles` examines every pair of ranks.
        pairs = self.G * self.G if self.in_circles else 0
        self.first_warps = max(self.warps, min(8, pairs // 1024))
        self.step = max(1, min(16, tile, 2048 * self.warps // tile))

    @property
    def settings(self) -> tuple[int, ...]:
        """Arguments that all first attempts take, in their order."""
        return self.domains, self.domain, self.slots, self.min_tokens, self.limit

    @property
    def shape(self) -> state.Shape:
        """Compile-time sizes of a domain."""
        held, one_slot = power_of_2(max(1, self.held)), self.slots == 1
        return state.Shape(self.H, self.G, held, one_slot, self.buffers, self.members)

    @property
    def step_over_domains(self) -> int:
        """Domains whose rows a program loads together."""
        return power_of_2(min(self.domains, max(1, 2048 // (self.H * self.G))))

    def _tables(
        self, experts_by_rank: IntArray, first_of_rank: IntArray, device: torch.device
    ) -> None:
        """Allocate what never changes: homes and slots."""
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
        self.home_of_expert = table(self.experts, experts, ranks)
        self.home_slot_of_expert = table(self.experts, experts, home_slots)
        self.expert_of_slot = table(self.num_slots, home_slots, experts)  # spare slots change
        self.first_slot_of_rank = table(self.ranks + 1, slice(None), first_slot)
        self.home = table(padded, [], [])  # rows of every expert at its home

    def _allocate(self, device: torch.device) -> None:
        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=INT, device=device)

        copies = max(1, self.ranks * self.slots)  # at least one row, unused without slots
        self.expert_loads = numbers(self.experts)
        self.attempts = numbers(self.domains, self.buffers, 2, max(1, self.held))
        self.attempt_loads = numbers(self.domains, self.buffers, self.domain)
        self.facts = numbers(self.domains, state.facts_size(self.members))
        self.outcomes = numbers(self.domains, self.tried, state.OUTCOMES.value)
        self.finished = numbers(1)  # programs of a launch
        self.counts = numbers(self.domains, self.members, self.H * self.G)
        if self.by_groups:
            self.work = numbers(self.domains, state.work_size(self.H, self.G))
        self.scratch = numbers(self.domains, state.scratch_size(self.H, self.G))
        self.placed = torch.full((2, copies), 2**31 - 1, dtype=INT, device=device)
        self.faults = numbers(1)  # loads that are negative or too large
        # All results are in one piece of memory, which one copy takes to the host.
        self.places, end = {}, 0
        for name, shape in self._results(copies).items():
            size = math.prod(shape)
            self.places[name] = slice(end, end + size), shape
            end += cdiv(size, 4) * 4  # aligned to 16 bytes
        self.result = numbers(end)
        for name, (at, shape) in self.places.items():
            setattr(self, name, self.result[at].view(shape))
        self.replicas.fill_(-1)
        self.slot_of_copy.fill_(-1)
        self.plan_tensors = Plan(
            self.replicas, self.quotas, self.slot_of_copy, self.split, self.num_replicas
        )
        self.home_tables = Homes(
            self.home_of_expert,
            self.home_slot_of_expert,
            self.first_slot_of_rank,
            self.expert_of_slot,
        )
        self._attempts = state.Attempts(
            self.attempts, self.attempt_loads, self.facts, self.outcomes, self.scratch
        )
        self._plan_out = PlanOut(
            self.placed,
            self.rank_loads,
            self.expert_of_slot,
            self.expert_of_place,
            self.first_slot_of_rank,
        )

    def _results(self, copies: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors of a plan."""
        return {
            "num_replicas": (1,),
            "rank_loads": (self.ranks,),
            "quotas": (copies,),
            "replicas": (copies, 3),
            "slot_of_copy": (copies,),
            "split": (copies, self.ranks),
        }

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
        if self.by_groups:
            self._first_by_groups()
        if self.timed:
            self._try_rungs()
            return
        if self.slack:
            self._first_try()
        self._search(first=not (self.slack or self.by_groups))

    def _first_by_groups(self) -> None:
        quick(groups.first_by_groups)[(self.domains,)](
            self.home,
            self.work,
            self.counts,
            self._attempts,
            *self.settings,
            self.parts,
            SHAPE=self.shape,
            num_warps=1,
        )

    def _try_rungs(self) -> None:
        quick(rungs.try_rungs)[(self.domains, self.tried)](
            self.home,
            self.counts,
            self.tolerances,
            self.rates,
            self._attempts,
            self.finished,
            self._plan_out,
            *self.settings,
            SHAPE=self.shape,
            BY_GROUPS=self.by_groups,
            PADDED=power_of_2(self.tried),
            STEP=self.step_over_domains,
            SEARCH_STEP=self.step,
            num_warps=self.warps,
        )

    def _first_try(self) -> None:
        quick(place.first_try)[(self.domains, self.members - self.by_groups)](
            self.home,
            self.counts,
            self._attempts,
            *self.settings,
            self.parts,
            SHAPE=self.shape,
            BY_GROUPS=self.by_groups,
            STEP=self.step_over_domains,
            num_warps=self.first_warps,
        )

    def _search(self, first: bool) -> None:
        quick(place.search)[(self.domains,)](
            self.home,
            self._attempts,
            self._plan_out,
            *self.settings[1:],
            FIRST=first,
            SHAPE=self.shape,
            STEP=self.step,
            num_warps=self.warps,
        )

    def bounds(self) -> torch.Tensor:
        """[D] the least load of the fullest rank that any plan of a domain can reach."""
        bounds = torch.empty(self.domains, dtype=INT, device=self.facts.device)
        quick(place.lower_bounds)[(self.domains,)](
            self.home,
            self.scratch,
            bounds,
            self.domain,
            self.slots,
            self.limit,
            SHAPE=self.shape,
            STEP=self.step,
            num_warps=self.warps,
        )
        return bounds

    def lay_out(self, loads_RE: torch.Tensor) -> None:
        """Write the replicas with slots and quotas, and their rows from every source."""
        if not self.slots:
            return
        quick(place.split)[(len(self.quotas),)](
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
