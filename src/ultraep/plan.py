"""Stage 2: loads -> Plan: the replicas of a microbatch and the rows that each of them serves.

Shapes: R ranks, E experts, C replicas. `placed_C3`, which policies return, has columns expert,
host, quota; `replicas` of a plan has columns expert, host, spare slot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ultraep.arrays import IntArray, frozen
from ultraep.backends import select
from ultraep.backends.limits import Limits
from ultraep.config import NO_RATES, PARTS, UNITS_PER_ROW, BalanceConfig, Rates
from ultraep.errors import ConfigError, LoadError, PlanError
from ultraep.loads import MAX_TOTAL, as_integers, as_loads
from ultraep.policies import (
    BUILT_IN,
    Policy,
    Problem,
    check_loads,
    check_replicas,
    check_shape,
    check_slots,
    check_split,
    get_policy,
)
from ultraep.topology import Topology, sum_by_rank

DEFAULT_CONFIG = BalanceConfig()
PER_MS = 1e9  # picoseconds
SHORT = 0.05  # imbalance that more slots should remove


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The replicas of one microbatch and the rows they serve.

    Two ranks with one expert each; all 6 rows are routed to expert 0:

    >>> topology = Topology(ranks=2, experts=2, slots=1)
    >>> example = plan([[3, 0], [3, 0]], topology)
    >>> example.replicas  # a replica of expert 0 on rank 1, in spare slot 0
    array([[0, 1, 0]])
    >>> example.quotas  # it serves 3 rows
    array([3])
    >>> example.split  # all of them come from rank 1
    array([[0, 3]])
    >>> example.initial_imbalance, example.imbalance
    (2.0, 1.0)
    """

    topology: Topology
    config: BalanceConfig
    loads: IntArray  # [R, E] rows that each source rank routes to each expert
    replicas: IntArray  # [C, 3] expert, host rank, spare slot; sorted by expert, then host
    quotas: IntArray  # [C] rows that each replica serves; the home serves the rest
    split: IntArray  # [C, R] the same rows, by source rank
    rank_loads: IntArray  # [R] rows that each rank serves

    def to_host(self) -> Plan:
        """Return the plan itself; device plans copy it to the host."""
        return self

    def to_host_async(self) -> Callable[[], Plan]:
        """Return a callable that returns the plan, as device plans do."""
        return self.to_host

    def of_domain(self, domain: int) -> Plan:
        """Return the part of one fast-link domain, for `topology.of_domain(domain)`.

        The rows of other domains come from the rank of this domain at the same place as theirs.
        """
        topology, size = self.topology, self.topology.domain_size
        ranks = slice(domain * size, (domain + 1) * size)
        experts = topology.experts_of_domain(domain)
        inside = self.replicas[:, 1] // size == domain
        replicas = self.replicas[inside] - [0, domain * size, 0]
        replicas[:, 0] = np.searchsorted(experts, replicas[:, 0])
        speeds = self.speeds[ranks] or None
        return Plan(
            topology.of_domain(domain),
            replace(self.config, speeds=speeds),
            frozen(_by_place(self.loads[:, experts].T, size).T),
            frozen(replicas),
            frozen(self.quotas[inside]),
            frozen(_by_place(self.split[inside], size)),
            frozen(self.rank_loads[ranks]),
        )

    @property
    def num_replicas(self) -> int:
        return len(self.replicas)

    @property
    def max_fanout(self) -> int:
        """Most replicas of one expert."""
        return _largest(np.bincount(self.replicas[:, 0]))

    @property
    def max_ingress(self) -> int:
        """Most replicas that one rank receives."""
        return _largest(np.bincount(self.replicas[:, 1]))

    @property
    def max_egress(self) -> int:
        """Most experts that one rank sends; relays forward further replicas of an expert."""
        experts = np.unique(self.replicas[:, 0])
        return _largest(np.bincount(self.topology.home_of_expert[experts]))

    @property
    def leaves_domain(self) -> bool:
        """Whether a replica is outside of the fast-link domain of its home."""
        size = self.topology.domain_size
        homes = self.topology.home_of_expert[self.replicas[:, 0]]
        return bool((homes // size != self.replicas[:, 1] // size).any())

    @property
    def within_limits(self) -> bool:
        """Whether the plan fits the slots and the fast-link domains."""
        return self.max_ingress <= self.topology.slots and not self.leaves_domain

    @property
    def total(self) -> int:
        """Routed rows of the microbatch."""
        return int(self.rank_loads.sum())

    @property
    def imbalance(self) -> float:
        """Rows of the fullest rank over the mean, with replicas; 1.0 is perfect.

        With speeds: the time of the slowest rank, rows over speed, over the time of a perfect plan.
        """
        return self._over_mean(self.rank_loads)

    @property
    def initial_imbalance(self) -> float:
        """The imbalance without replicas."""
        return self._over_mean(self.initial_rank_loads)

    @property
    def lower_bound(self) -> float:
        """A lower bound on the imbalance of any plan for these loads.

        It considers slots, domains and `max_replicas`, not `min_tokens_per_replica` or tolerance.
        """
        limits = Limits.of(self.topology, self.config)
        peak = int(select().lower_bound(self.loads.sum(axis=0), limits))
        return self._over_mean(self.rank_loads, peak)

    @property
    def initial_rank_loads(self) -> IntArray:
        """[R] rows that each rank would serve without replicas."""
        homes, ranks = self.topology.home_of_expert, self.topology.ranks
        return sum_by_rank(self.loads.sum(axis=0), homes, ranks)

    @property
    def speeds(self) -> tuple[int, ...]:
        """The speed of every rank, in thousandths of the nominal speed; () if all are equal."""
        return self.config.speeds_for(self.topology.ranks)

    @property
    def rates(self) -> Rates | None:
        """The rates, if the objective is time and they are known."""
        return self.config.rates if self.config.objective == "time" else None

    @property
    def rate_numbers(self) -> tuple[int, int, int, int]:
        """The rates as traces store them; zeros: no rates."""
        return NO_RATES if self.rates is None else self.rates.numbers

    @property
    def speed_numbers(self) -> tuple[int, ...]:
        """The speed of every rank as traces store them; zeros: equal."""
        return self.speeds or (0,) * self.topology.ranks

    @property
    def time(self) -> int | None:
        """Estimated picoseconds, by the rates; None without rates."""
        if self.rates is None:
            return None
        transfers = max(self.max_ingress, self.max_egress)
        return self._time(self.rates, self.rank_loads, transfers, self.num_replicas)

    @property
    def time_without_replicas(self) -> int | None:
        """Estimated picoseconds without replicas; None without rates."""
        if self.rates is None:
            return None
        return self._time(self.rates, self.initial_rank_loads, 0, 0)

    @property
    def left_alone(self) -> bool:
        """Whether the ranks stay uneven because, by the rates, replicas would cost more."""
        if self.rates is None or self.num_replicas or not self.topology.can_replicate:
            return False
        return self.config.policy == "ultraep" and self.imbalance > 1 + self.config.tolerance

    @property
    def short_of_slots(self) -> bool:
        """Whether more slots would help: the ranks with spare time have no free slot."""
        if not self.topology.can_replicate or self.imbalance <= 1 + self.config.tolerance + SHORT:
            return False
        size, ranks = self.topology.domain_size, self.topology.ranks
        first = int(self.rank_loads.argmax()) // size * size
        loads = self.rank_loads[first : first + size]
        used = np.bincount(self.replicas[:, 1], minlength=ranks)[first : first + size]
        return bool((used[loads < loads.mean()] >= self.topology.slots).all())

    @property
    def remote_tokens(self) -> int:
        """Rows that are served on another rank than their source."""
        homes = self.topology.home_of_expert
        experts, hosts = self.replicas[:, 0], self.replicas[:, 1]
        replicas = np.arange(len(experts))
        local = self.loads[homes, np.arange(len(homes))].sum()
        local -= self.split[replicas, homes[experts]].sum()
        local += self.split[replicas, hosts].sum()
        return int(self.rank_loads.sum() - local)

    def dense_quota(self) -> IntArray:
        """Return `[E, R]` rows of each expert that each rank serves."""
        quota_ER = np.zeros((self.topology.experts, self.topology.ranks), dtype=np.int64)
        quota_ER[self.replicas[:, 0], self.replicas[:, 1]] = self.quotas
        at_home = self.loads.sum(axis=0) - quota_ER.sum(axis=1)
        quota_ER[np.arange(len(at_home)), self.topology.home_of_expert] += at_home
        return quota_ER

    def digest(self) -> str:
        """Return a stable hash: equal plans have equal digests on every machine and backend."""
        digest = hashlib.blake2b(b"ultraep-plan-1", digest_size=16)
        shape = [*self.loads.shape, self.topology.slots, self.topology.domain_size]
        for array in (
            np.array(shape),
            self.topology.home_of_expert,
            self.loads,
            self.replicas,
            self.quotas,
            self.split,
        ):
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return digest.hexdigest()

    def check(self, loads: Any) -> None:
        """Raise `PlanError`, naming the broken rule, if the plan is not valid for these loads."""
        limited = get_policy(self.config.policy).within_limits
        check_loads(self.loads, as_loads(loads, self.topology))
        check_shape(self.replicas)
        if self.quotas.shape != (self.num_replicas,):
            raise PlanError(
                "shape", f"{self.num_replicas} replicas, but quotas {self.quotas.shape}"
            )
        placed_C3 = np.column_stack([self.replicas[:, :2], self.quotas])
        check_replicas(placed_C3, self.loads, self.topology, limited=limited)
        check_slots(self.replicas, self.topology, limited=limited)
        check_split(self.split, placed_C3, self.loads)
        served = self.dense_quota().sum(axis=0)
        if not np.array_equal(self.rank_loads, served):
            raise PlanError("rank loads", f"{self.rank_loads.tolist()}, served {served.tolist()}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self.topology == other.topology and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    def __repr__(self) -> str:
        return (
            f"Plan({self.config.policy}, {self.topology.ranks} ranks, "
            f"{self.topology.experts} experts: imbalance {self.initial_imbalance:.3f} -> "
            f"{self.imbalance:.3f} with {self.num_replicas} replicas{self._times()})"
        )

    def _times(self) -> str:
        if self.time is None or self.time_without_replicas is None:
            return ""
        planned, without = (ps / PER_MS for ps in (self.time, self.time_without_replicas))
        return f", {planned:.3g} ms by its rates, {without:.3g} without replicas"

    def _time(self, rates: Rates, rank_loads: IntArray, transfers: int, replicas: int) -> int:
        peak, unit = peak_of(rank_loads, self.speeds)
        return rates.time(peak=peak, unit=unit, transfers=transfers, replicas=replicas)

    def _over_mean(self, rank_loads: IntArray, peak: int | None = None) -> float:
        """Return the peak of these loads, or a given peak, over the peak of a perfect plan."""
        total, speeds = int(rank_loads.sum()), self.config.speeds_for(self.topology.ranks)
        if not total:
            return 1.0
        peak = peak_of(rank_loads, speeds)[0] if peak is None else peak
        if speeds:
            return peak * sum(speeds) / (PARTS * total)
        return peak * self.topology.ranks / total


def plan(
    loads: Any,
    topology: Topology,
    config: BalanceConfig = DEFAULT_CONFIG,
    *,
    backend: str | None = None,
    history: Any = None,
) -> Plan:
    """Plan one microbatch: a pure integer function of loads, topology and config.

    loads: `[source rank, expert]` integers, as an array, a tensor or nested lists.
    backend: "cpu", "reference", or None for the faster one. All backends return the same plan.
    history: `[..., expert]` past loads, for offline policies that use them.
    """
    policy = get_policy(config.policy)
    config.speeds_for(topology.ranks)  # raises if their number is wrong
    engine = select(backend)
    loads_RE = as_loads(loads, topology)
    if history is None and policy.needs_history:
        raise ConfigError(f"policy {policy.name!r} needs past loads; pass history=")
    past_E = None if history is None else _past(history, topology)
    problem = Problem(loads_RE, loads_RE.sum(axis=0), topology, config, engine, past_E)
    return _with_split(problem, decided(policy, problem))


def decided(policy: Policy, problem: Problem) -> IntArray:
    """Return the `[C, 3]` replicas of a policy, sorted; check policies that are not built in."""
    placed_C3 = policy.decide(problem)
    check_shape(placed_C3)
    place = placed_C3[:, 0] * problem.topology.ranks + placed_C3[:, 1]
    if not (place[1:] > place[:-1]).all():
        placed_C3 = placed_C3[np.argsort(place, kind="stable")]
    if policy.name not in BUILT_IN:
        check_replicas(placed_C3, problem.loads, problem.topology, limited=policy.within_limits)
    return placed_C3


def plan_from_replicas(
    loads: Any, topology: Topology, config: BalanceConfig, placed_C3: IntArray
) -> Plan:
    """Return the plan with these replicas (expert, host, quota), for example from a trace.

    The policy of the config need not be registered.
    """
    loads_RE = as_loads(loads, topology)
    problem = Problem(loads_RE, loads_RE.sum(axis=0), topology, config, select(), None)
    check_replicas(placed_C3, loads_RE, topology, limited=False)
    return _with_split(problem, placed_C3)


def _with_split(problem: Problem, placed_C3: IntArray) -> Plan:
    """Complete a plan: spare slots, rank loads, and the split over source ranks."""
    topology, engine = problem.topology, problem.backend
    homes = topology.home_of_expert
    placed_C3 = np.ascontiguousarray(placed_C3)  # another layout would be compiled on its own
    split_CR = engine.split(problem.loads, homes, placed_C3, problem.config.locality)
    rank_loads, slots = engine.tally(problem.expert_loads, homes, placed_C3, topology.ranks)
    replicas, quotas = placed_C3.copy(), placed_C3[:, 2].copy()
    replicas[:, 2] = slots
    arrays = (problem.loads, replicas, quotas, split_CR, rank_loads)
    for array in arrays:
        array.flags.writeable = False
    return Plan(topology, problem.config, *arrays)


def peak_of(rank_loads: IntArray, speeds: Sequence[int]) -> tuple[int, int]:
    """Return the least threshold that allows these loads, and how many units of it are a row.

    Without speeds, or with (), the threshold counts rows; otherwise thousandths of a row at nominal
    speed.
    """
    if not speeds:
        return int(rank_loads.max(initial=0)), 1
    return _largest(-(-rank_loads * PARTS // np.array(speeds))), UNITS_PER_ROW


def _past(history: Any, topology: Topology) -> IntArray:
    """Return [E] the sums of past loads."""
    array = as_integers(history, "history")
    if not array.ndim or array.shape[-1] != topology.experts:
        raise LoadError(
            f"history must be [..., {topology.experts} experts], got {list(array.shape)}"
        )
    if array.size and not 0 <= array.min() <= array.max() <= MAX_TOTAL:
        raise LoadError(f"history must lie in 0..{MAX_TOTAL}, got {array.min()}..{array.max()}")
    past_E: IntArray = array.reshape(-1, topology.experts).sum(axis=0, dtype=np.int64)
    return past_E


def _by_place(rows_NR: IntArray, size: int) -> IntArray:
    """Return [N, size] the sums over the ranks at the same place of all domains."""
    domains = rows_NR.shape[1] // size
    total: IntArray = rows_NR.reshape(len(rows_NR), domains, size).sum(axis=1)
    return total


def _largest(values: IntArray) -> int:
    return int(values.max(initial=0))
