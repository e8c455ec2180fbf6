"""Loads, topologies and ids for many tests: named cases and hypothesis strategies."""

from dataclasses import replace

import numpy as np
import registered_policy  # noqa: F401
import torch
from hypothesis import strategies as st

import ultraep
from ultraep import BalanceConfig, Rates, workload
from ultraep.arrays import PADDING

MAX_TOTAL = 2**31 - 1
EVEN = workload.Load("random even")
POLICIES = ("none", "ultraep", "quota")  # without history


def one_hot(ranks, experts, *, tokens, expert=0):
    loads = np.zeros((ranks, experts), dtype=np.int64)
    loads[:, expert] = tokens
    return loads


def lognormal(ranks, experts, *, tokens, top_k=8, sigma=1.0):
    rng = np.random.default_rng(0)
    popularity = np.exp(rng.normal(0.0, sigma, experts))
    return workload.generators.draw(popularity, ranks, top_k, tokens, rng)


def _named() -> dict[str, tuple[np.ndarray, ultraep.Topology]]:
    def case(loads, **topology):
        loads = np.asarray(loads)
        ranks, experts = loads.shape
        return loads, ultraep.Topology(ranks=ranks, experts=experts, **topology)

    uneven = [0, 0, 0, 1, 1, 2, 3, 3, 3, 3]
    return {
        "uniform": case(EVEN.draw(8, 32, top_k=4, tokens=256)),
        "one_hot": case(one_hot(8, 32, tokens=100)),
        "one_hot_many_slots": case(one_hot(8, 32, tokens=100, expert=17), slots=3),
        "zipf": case(workload.zipf(16, 64, ratio=3.0, tokens=512)),
        "zipf_shuffled": case(workload.zipf(16, 64, ratio=3.0, tokens=512, shuffled=True)),
        "zipf_two_slots": case(workload.zipf(16, 32, ratio=2.0, tokens=512), slots=2),
        "lognormal_domains": case(lognormal(16, 48, sigma=2.0, tokens=128), domain=4),
        "no_slots": case(workload.zipf(8, 16, ratio=2.0, top_k=2, tokens=64), slots=0),
        "one_rank": case(EVEN.draw(1, 4, top_k=2, tokens=10)),
        "one_rank_domains": case(workload.zipf(4, 8, ratio=2.0, top_k=2, tokens=50), domain=1),
        "empty": case(np.zeros((4, 8), dtype=int)),
        "one_token": case(np.eye(1, 8, dtype=int).repeat(4, axis=0)),
        "single_row": case(np.vstack([np.arange(8), np.zeros((3, 8), dtype=int)])),
        "uneven_homes": case(lognormal(4, 10, top_k=3, tokens=99), homes=uneven),
        "a_rank_without_homes": case(lognormal(4, 6, top_k=2, tokens=99), homes=[0, 0, 0, 1, 1, 3]),
        "near_overflow": case(_near_overflow()),
        "wide": case(workload.zipf(64, 256, ratio=4.0, shuffled=True, seed=3)),
        "unclosable": case(_many_small_experts(), slots=1),
    }


def _near_overflow() -> np.ndarray:
    loads = np.zeros((4, 8), dtype=np.int64)
    loads[:, 2] = MAX_TOTAL // 4 - 5
    loads[1, 7] = 19
    return loads


def _many_small_experts() -> np.ndarray:
    """Rank 0 has three times the load of the others, in experts too small for a slot."""
    rng = np.random.default_rng(5)
    loads = rng.integers(20, 40, (4, 48))
    loads[:, :12] *= 3
    return loads


NAMED = _named()


@st.composite
def topologies(draw: st.DrawFn, max_ranks: int = 8, max_slots: int = 3) -> ultraep.Topology:
    domain = draw(st.integers(1, max_ranks))
    ranks = domain * draw(st.integers(1, max_ranks // domain))
    homes = None
    if draw(st.booleans()):
        experts = draw(st.integers(1, 24))
        homes = draw(st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts))
    else:
        experts = ranks * draw(st.integers(1, 5))
    slots = draw(st.integers(0, min(max_slots, experts)))
    return ultraep.Topology(ranks=ranks, experts=experts, slots=slots, domain=domain, homes=homes)


@st.composite
def problems(draw: st.DrawFn, **limits: int) -> tuple[np.ndarray, ultraep.Topology]:
    """Draw loads of many shapes: flat, skewed, sparse, tiny and huge."""
    topology = draw(topologies(**limits))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (topology.ranks, topology.experts)
    popularity = np.exp(rng.normal(0, draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0])), shape[1]))
    scale = draw(st.sampled_from([0.3, 3, 30, 3000, 10**6])) / popularity.mean()
    return rng.poisson(popularity * scale, shape), topology


@st.composite
def small_problems(draw: st.DrawFn, microbatches: int = 1) -> tuple[np.ndarray, ultraep.Topology]:
    """Draw [S, R, E] loads, and a topology with domains and uneven homes."""
    topology = draw(topologies())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    largest, count = (
        draw(st.sampled_from([0, 1, 5, 100, 20_000])),
        draw(st.integers(1, microbatches)),
    )
    popularity_SE = rng.integers(0, largest, (count, topology.experts), endpoint=True)
    shape = (count, topology.ranks, topology.experts)
    return rng.integers(0, popularity_SE[:, None], shape, endpoint=True), topology


configs = st.builds(
    BalanceConfig,
    tolerance=st.sampled_from([0.0, 0.01, 0.1, 1.0, 4.0]),
    min_tokens_per_replica=st.sampled_from([1, 1, 2, 50]),
    max_replicas=st.sampled_from([None, None, 0, 1, 3]),
    locality=st.booleans(),
)


def with_speeds(draw: st.DrawFn, config: BalanceConfig, ranks: int) -> BalanceConfig:
    """Return the config with speeds of all ranks: some or all equal, near, or far apart."""
    speed = st.sampled_from(
        draw(st.sampled_from([(800, 900, 950, 1000), (999, 1000), (100, 1000, 10_000), (997,)]))
    )
    return replace(config, speeds=draw(st.lists(speed, min_size=ranks, max_size=ranks)))


timed_configs = st.builds(
    BalanceConfig,
    tolerance=st.sampled_from([0.0, 0.0, 0.01, 0.7]),
    min_tokens_per_replica=st.sampled_from([1, 1, 50]),
    max_replicas=st.sampled_from([None, None, 0, 3]),
    rates=st.builds(
        Rates,
        row=st.sampled_from([1, 100, 100_000, 2**31 - 1]),
        copy=st.sampled_from([0, 10, 10**6, 2**40]),
        each=st.sampled_from([0, 1, 10**5, 2**40]),
        layer=st.sampled_from([0, 100, 10**7, 2**40]),
    ),
)


def draw_ids(rng, tokens, top_k, topology, skew):
    """Return skewed `[T, K]` ids, with repetition."""
    liked = np.exp(rng.normal(0, skew, topology.experts))
    ids = rng.choice(topology.experts, (tokens, top_k), p=liked / liked.sum())
    return torch.from_numpy(ids)


def plan_of(ids_of_rank, topology, config=None):
    loads = [ultraep.count_loads(ids, topology.experts) for ids in ids_of_rank]
    return ultraep.plan(np.array(loads), topology, config or BalanceConfig())


def with_padding(rng, ids, share):
    """Replace about this share of the ids by padding."""
    return ids.where(torch.from_numpy(rng.random(ids.shape) >= share), PADDING)


@st.composite
def routings(draw):
    """Draw the ids of all ranks, some of them padding, and a plan for them."""
    topology = draw(topologies(max_ranks=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    skew = draw(st.sampled_from([0.0, 1.0, 3.0]))
    top_k = draw(st.integers(1, 3))
    most = draw(st.sampled_from([0, 1, 5, 60]))
    config = BalanceConfig(policy=draw(st.sampled_from(POLICIES)), locality=draw(st.booleans()))
    ids = [
        draw_ids(rng, int(rng.integers(0, most + 1)), top_k, topology, skew)
        for _ in range(topology.ranks)
    ]
    padding = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    ids = [with_padding(rng, own, padding) for own in ids]
    return ids, plan_of(ids, topology, config)


def random_replicas(rng, topology, fullness):
    """Put random experts into random spare slots of their domain, some more often than others."""
    liked, replicas = rng.normal(0, 2, topology.experts), []
    domain_of_rank = np.arange(topology.ranks) // topology.domain_size
    for host in range(topology.ranks):
        near = domain_of_rank[topology.home_of_expert] == domain_of_rank[host]
        order = np.argsort(-(liked + rng.gumbel(size=topology.experts)))
        away = order[(near & (topology.home_of_expert != host))[order]].tolist()
        places = zip(away, rng.permutation(topology.slots).tolist(), strict=False)
        held = [place for place in places if rng.random() < fullness]
        replicas += [(expert, host, slot) for expert, slot in held]
    return sorted(replicas)


def skewed_ids(rank, experts=8, tokens=40, seed=0):
    """Return `[T, 1]` ids that prefer the first experts."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    liked = torch.exp(-0.8 * torch.arange(experts))
    return torch.multinomial(liked, tokens, replacement=True, generator=generator)[:, None]


def assert_same_plan(plan, wanted):
    for name in ("replicas", "quotas", "split", "rank_loads"):
        np.testing.assert_array_equal(getattr(plan, name), getattr(wanted, name), err_msg=name)
    assert plan.digest() == wanted.digest()
