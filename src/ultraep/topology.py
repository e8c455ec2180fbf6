"""Topology: ranks, fast-link domains, home ranks of experts, and spare slots.

Shapes: R ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ultraep.arrays import IntArray, frozen
from ultraep.errors import ConfigError

MAX_RANKS = 1 << 16
MAX_EXPERTS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Where experts live and where their replicas may go.

    ranks: ranks of the expert-parallel group.
    experts: experts of one layer.
    slots: spare slots of every rank, each for one replica.
    domain: number of consecutive ranks joined by a fast link; replicas stay in the domain of their
        home. None: one domain.
    homes: home rank of every expert. None: blocks of `experts / ranks` consecutive experts.

    Slots are numbered rank by rank: first the home slots of a rank, then its spare slots.

    >>> topology = Topology(ranks=2, experts=4, slots=1)
    >>> topology.home_of_expert, topology.home_slot_of_expert, topology.first_slot_of_rank
    (array([0, 0, 1, 1]), array([0, 1, 3, 4]), array([0, 3, 6]))
    """

    ranks: int
    experts: int
    slots: int = 1
    domain: int | None = None
    homes: Sequence[int] | None = None

    home_of_expert: IntArray = field(init=False, repr=False, compare=False)
    experts_by_rank: IntArray = field(init=False, repr=False, compare=False)
    first_of_rank: IntArray = field(init=False, repr=False, compare=False)
    first_slot_of_rank: IntArray = field(init=False, repr=False, compare=False)
    home_slot_of_expert: IntArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_range("ranks", self.ranks, 1, MAX_RANKS)
        _check_range("experts", self.experts, 1, MAX_EXPERTS)
        _check_range("slots", self.slots, 0, self.experts)
        domain = self.ranks if self.domain is None else self.domain
        _check_range("domain", domain, 1, self.ranks)
        if self.ranks % domain:
            raise ConfigError(
                f"the domain must divide the ranks: {self.ranks} ranks do not divide by a domain "
                f"of {domain}"
            )
        home_of_expert = self._home_of_expert()
        counts_R = np.bincount(home_of_expert, minlength=self.ranks)
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts_R)])
        by_rank = np.argsort(home_of_expert, kind="stable").astype(np.int64)
        self._set("domain", domain)
        self._set("homes", None if self.homes is None else tuple(home_of_expert.tolist()))
        self._set("home_of_expert", frozen(home_of_expert))
        self._set("experts_by_rank", frozen(by_rank))
        self._set("first_of_rank", frozen(first))
        self._set("first_slot_of_rank", frozen(first + np.arange(self.ranks + 1) * self.slots))
        places = np.empty_like(by_rank)
        places[by_rank] = np.arange(self.experts)
        self._set("home_slot_of_expert", frozen(places + home_of_expert * self.slots))

    @property
    def domain_size(self) -> int:
        """Ranks of one fast-link domain."""
        assert self.domain is not None
        return self.domain

    @property
    def can_replicate(self) -> bool:
        """Whether replicas are possible at all: there are spare slots and several ranks."""
        return self.slots > 0 and self.domain_size > 1

    @property
    def num_domains(self) -> int:
        return self.ranks // self.domain_size

    def home_experts(self, rank: int) -> IntArray:
        """Return the home experts of a rank, ascending, in the order of its home slots."""
        return self.experts_by_rank[self.first_of_rank[rank] : self.first_of_rank[rank + 1]]

    def experts_of_domain(self, domain: int) -> IntArray:
        """Return the experts whose homes are in a domain, ascending."""
        return np.flatnonzero(self.home_of_expert // self.domain_size == domain)

    def of_domain(self, domain: int) -> Topology:
        """Return one domain as a topology of its own: ranks, experts and slots counted from 0."""
        return _of_domain(self, domain)

    def spare_slot(self, host: IntArray | int, index: IntArray | int) -> IntArray:
        """Return the global number of a spare slot."""
        end: IntArray = self.first_slot_of_rank[np.asarray(host) + 1]
        return end - self.slots + index

    @property
    def homes_per_rank(self) -> IntArray:
        """[R] home experts of every rank."""
        return np.diff(self.first_of_rank)

    def _home_of_expert(self) -> IntArray:
        if self.homes is None:
            if self.experts % self.ranks:
                raise ConfigError(
                    f"{self.experts} experts do not divide evenly over {self.ranks} ranks; "
                    "pass the home rank of every expert, for example "
                    "ultraep.topology.even_homes(experts, ranks)"
                )
            return np.repeat(np.arange(self.ranks), self.experts // self.ranks)
        try:
            homes = np.asarray(self.homes)
        except ValueError as error:
            raise ConfigError(f"homes must be a list of ranks: {error}") from None
        if homes.ndim != 1 or len(homes) != self.experts:
            raise ConfigError(
                f"homes must hold one rank for each of the {self.experts} experts, "
                f"got shape {tuple(homes.shape)}"
            )
        if not np.issubdtype(homes.dtype, np.integer):
            raise ConfigError(f"homes must be integers, got {homes.dtype}")
        if homes.min() < 0 or homes.max() >= self.ranks:
            raise ConfigError(
                f"homes must lie in 0..{self.ranks - 1}, got {homes.min()}..{homes.max()}"
            )
        return homes.astype(np.int64)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


@lru_cache(maxsize=64)
def _of_domain(topology: Topology, domain: int) -> Topology:
    slots, size = topology.slots, topology.domain_size
    homes = topology.home_of_expert[topology.experts_of_domain(domain)] - domain * size
    if len(homes) < max(1, slots):
        raise ConfigError(
            f"domain {domain} is the home of {len(homes)} experts, but every rank has "
            f"{slots} spare slots: pass other homes= or fewer slots"
        )
    return Topology(ranks=size, experts=len(homes), slots=slots, homes=homes.tolist())


def sum_by_rank(loads_E: IntArray, homes_E: IntArray, ranks: int) -> IntArray:
    """[R] rows of every rank if all experts serve at home."""
    return np.bincount(homes_E, weights=loads_E, minlength=ranks).astype(np.int64)


def even_homes(experts: int, ranks: int) -> list[int]:
    """Return a home rank for every expert, as evenly as possible.

    >>> even_homes(experts=5, ranks=2)
    [0, 0, 0, 1, 1]
    """
    return [expert * ranks // experts for expert in range(experts)]


def _check_range(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if not least <= value <= most:
        raise ConfigError(f"{name} must lie between {least} and {most}, got {value}")
