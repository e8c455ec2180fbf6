"""Random plans and routes of the device, compared with those of the CPU: bench_control.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from control_stages import Tally, same_plan, same_routes
from harness import Case, Line, Metric, Report, Samples, Values, progress
from timing import tell

import ultraep
from ultraep import BalanceConfig, Rates, Topology
from ultraep.arrays import IntArray
from ultraep.loads import MAX_TOTAL
from ultraep.reroute import reroute
from ultraep.runtime.control import ControlPlane

ROUTED_EVERY = 4  # of the random plans, those whose ids are rerouted too
PLANS = Metric("plans", "plans", "plans", ".0f", sum)
PLANS_EQUAL = Metric("plans_equal_to_the_twin", "plans", "equal", ".0f", sum)
ROUTES = Metric("routes", "routes", "routes", ".0f", sum)
ROUTES_EQUAL = Metric("routes_equal_to_the_twin", "routes", "equal ", ".0f", sum)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Topologies that are padded to the same powers of two, so that few kernels are compiled."""

    domain: tuple[int, ...]  # ranks of a domain, one of these
    domains: int = 1
    homes: tuple[int, ...]  # experts of a rank, one of these
    uneven: bool = False  # up to so many
    slots: int
    tolerances: tuple[float, ...] = (0.0, 0.01, 0.1, 1.0)
    timed: bool = False  # with rates, which decide

    @property
    def case(self) -> Case:
        return {
            "domains": self.domains,
            "of ranks": " or ".join(map(str, self.domain)),
            "homes": ("up to " if self.uneven else "") + " or ".join(map(str, self.homes)),
            "slots": self.slots,
            "objective": "time" if self.timed else "balance",
        }


TIGHT, LOOSE = (0.0,), (0.01, 0.1, 1.0)  # tolerances: other kernels for none than for some
# The small ones first: they are for the interpreter too. Those behind them are padded like the
# settings that are timed, but for the last: it is planned by groups of ranks.
FAMILIES = (
    Family(domain=(3, 4), homes=(3, 4), slots=1),
    Family(domain=(5, 8), homes=(2,), slots=2, tolerances=LOOSE),
    Family(domain=(3, 4), domains=2, homes=(5,), uneven=True, slots=3),
    Family(domain=(1,), homes=(3, 4), slots=1, tolerances=TIGHT),
    Family(domain=(3, 4), domains=2, homes=(3, 4), slots=2, tolerances=(0.0, 0.03), timed=True),
    Family(domain=(6, 8), homes=(3, 4), uneven=True, slots=0, tolerances=TIGHT),
    Family(domain=(5, 8), domains=8, homes=(3, 4), slots=1),
    Family(domain=(37, 64), homes=(3, 4), slots=1),
    Family(domain=(45, 64), homes=(4,), uneven=True, slots=2, tolerances=TIGHT),
    Family(domain=(200, 256), homes=(2,), slots=1),
)
SMALL = 6


def random_setting(family: Family, rng: np.random.Generator) -> tuple[Topology, BalanceConfig]:
    """One of the family, with any config."""
    domain, most = int(rng.choice(family.domain)), int(rng.choice(family.homes))
    ranks = domain * family.domains
    homes, experts = None, ranks * most
    if family.uneven:
        counts = rng.integers(0, most + 1, ranks)
        counts[rng.integers(ranks)] = most
        homes = rng.permutation(np.repeat(np.arange(ranks), counts)).tolist()
        experts = len(homes)
    return (
        Topology(ranks=ranks, experts=experts, slots=family.slots, domain=domain, homes=homes),
        BalanceConfig(
            tolerance=float(rng.choice(family.tolerances)),
            min_tokens_per_replica=int(rng.choice([1, 1, 2, 50])),
            max_replicas=(None, None, None, None, 0, 1, 3)[rng.integers(7)],
            locality=bool(rng.integers(2)),
            rates=random_rates(rng) if family.timed else None,
        ),
    )


def random_rates(rng: np.random.Generator) -> Rates:
    """Any, from copies that cost nothing to such that never pay."""
    each, copy, layer = (int(rng.choice([0, 10, 10**4, 10**7])) for _ in range(3))
    return Rates(row=int(rng.choice([1, 100, 10**5])), copy=copy, each=each, layer=layer)


def random_loads(topology: Topology, rng: np.random.Generator) -> IntArray:
    """[R, E] loads of many shapes: flat, skewed, sparse, tiny and huge."""
    shape = (topology.ranks, topology.experts)
    popularity = np.exp(rng.normal(0.0, rng.choice([0.0, 0.5, 1.0, 2.0, 4.0]), topology.experts))
    mean = min(float(rng.choice([0.3, 3, 30, 3000, 1e6])), MAX_TOTAL / 2 / np.prod(shape))
    loads: IntArray = rng.poisson(popularity * (mean / popularity.mean()), shape)
    return loads


@dataclass(slots=True)
class Compared:
    """Plans and routes of one setting, and how many of them are equal to those of the twin."""

    setting: tuple[Topology, BalanceConfig]
    values: dict[Metric, float]

    @property
    def differ(self) -> int:
        plans, plans_equal, routes, routes_equal = self.values.values()
        return int(plans - plans_equal + routes - routes_equal)


def compare(family: Family, plans: int, routed_rows: int, seed: Sequence[int]) -> Compared:
    """Random loads of one random setting, planned by the device and by the twin."""
    rng = np.random.default_rng(seed)
    topology, config = random_setting(family, rng)
    found = dict.fromkeys((PLANS, PLANS_EQUAL, ROUTES, ROUTES_EQUAL), 0.0)
    rank = int(rng.integers(topology.ranks))
    control = ControlPlane(topology, config, rows=routed_rows, rank=rank)
    for number in range(plans):
        loads = random_loads(topology, rng)
        want = ultraep.plan(loads, topology, config, backend="cpu")
        got = control.plan(torch.from_numpy(loads).to(control.device, torch.int32))
        found[PLANS] += 1
        found[PLANS_EQUAL] += same_plan(got.to_host(), want)
        rows = int(loads[rank].sum())
        if number % ROUTED_EVERY == 0 and rows < routed_rows:
            padding = rng.integers(min(8, routed_rows - rows) + 1)
            ids = np.repeat(np.arange(-1, topology.experts), [padding, *loads[rank]])
            choices = torch.from_numpy(rng.permutation(ids)[:, None])
            routes = control.reroute(choices.to(control.device))
            found[ROUTES] += 1
            found[ROUTES_EQUAL] += same_routes(routes, reroute(choices, want, rank, backend="cpu"))
    control.check()
    return Compared((topology, config), found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much is compared."""

    plans: int
    settings: int  # that the plans are divided among
    families: int
    routed_rows: int  # most of them, of the plans that are rerouted


def parity(report: Report, effort: Effort, tally: Tally) -> int:
    """Random plans and routes, equal to the twin's or not; the number of those that are not."""
    plans, number = effort.plans, min(effort.settings, effort.plans)
    families = FAMILIES[: effort.families]
    samples, together, differ = Samples(), Samples(), 0
    tell(f"parity of {plans} random plans")
    for index in progress(range(number), "parity"):
        family = families[index % len(families)]
        share = plans * (index + 1) // number - plans * index // number
        found = compare(family, share, effort.routed_rows, (2026, index))
        samples.add(family.case, found.values)
        together.add({"domains": "all"}, found.values)
        if found.differ:
            report.note(f"{found.differ} plans or routes differ: {found.setting}")
        differ += found.differ
    timed: Values = {
        PLANS: tally.plans,
        PLANS_EQUAL: tally.plans,
        ROUTES: tally.routes,
        ROUTES_EQUAL: tally.routes,
    }
    report.section = "parity"
    lines = [*samples.lines(), *together.lines(), Line({"domains": "as timed"}, timed)]
    report.add("plans and routes, equal to the twin's", lines)
    return differ
