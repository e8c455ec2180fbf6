"""The kernels on a GPU: captured in graphs, without synchronisation, and for many random loads.

`test_triton.py` also runs on a GPU and covers the other inputs.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import assert_same_plan, draw_ids, plan_of
from test_triton import assert_same_routes

import ultraep
from ultraep import BalanceConfig, Rates, Topology, workload
from ultraep.runtime.device_planner import DevicePlanner

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TOPOLOGIES = {
    "8 ranks": Topology(ranks=8, experts=32),
    "two slots in domains of 8": Topology(ranks=16, experts=64, slots=2, domain=8),
    "64 ranks": Topology(ranks=64, experts=256),
    "72 ranks": Topology(ranks=72, experts=288),
    "uneven homes": Topology(ranks=4, experts=10, homes=[0, 0, 0, 1, 1, 2, 3, 3, 3, 3]),
}
CONFIGS = {
    "exact": BalanceConfig(),
    "loose": BalanceConfig(tolerance=0.05, locality=False, min_tokens_per_replica=3),
    "few links": BalanceConfig(rates=Rates(row=1000, copy=20_000, layer=3000)),
    "few replicas": BalanceConfig(rates=Rates(row=1000, each=5000), tolerance=0.02),
}


def random_loads(topology, seed):
    """Flat or skewed loads, few or many rows."""
    rng = np.random.default_rng(seed)
    shape = (topology.ranks, topology.experts)
    liked = np.exp(rng.normal(0, rng.choice([0.0, 0.5, 1.0, 2.0, 4.0]), topology.experts))
    scale = rng.choice([0.3, 3, 30, 3000]) / liked.mean()
    return rng.poisson(liked * scale, shape)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_random_plans(topology, config):
    control = DevicePlanner(topology, config, rows=0, device=CUDA)
    for seed in range(50):
        loads = random_loads(topology, seed)
        actual = control.plan(torch.tensor(loads, device=CUDA)).to_host()
        assert_same_plan(actual, ultraep.plan(loads, topology, config))
    control.check()


@pytest.mark.parametrize(
    "config",
    [BalanceConfig(), BalanceConfig(tolerance=0.01), CONFIGS["few links"]],
    ids=["exact", "loose", "few links"],
)
def test_a_plan_of_1024_ranks(config):
    topology = Topology(ranks=1024, experts=4096)
    control = DevicePlanner(topology, config, rows=0, device=CUDA)
    for seed in range(3):
        loads = workload.zipf(1024, 4096, ratio=3.0, tokens=512, shuffled=True, seed=seed)
        actual = control.plan(torch.tensor(loads, device=CUDA)).to_host()
        assert_same_plan(actual, ultraep.plan(loads, topology, config))


class Step:
    """One rank's step with inputs at fixed addresses, as a graph needs them."""

    def __init__(self, tokens=3000, top_k=4, rank=3):
        self.topology, self.rank = Topology(ranks=8, experts=32, slots=2), rank
        self.tokens, self.top_k = tokens, top_k
        self.control = DevicePlanner(self.topology, rows=tokens * top_k, rank=rank, device=CUDA)
        self.ids = torch.zeros(tokens, top_k, dtype=torch.int64, device=CUDA)
        self.loads = torch.zeros(8, 32, dtype=torch.int32, device=CUDA)

    def draw(self, seed):
        """Draw other ids and loads; return the plan that the host makes for them."""
        rng = np.random.default_rng(seed)
        ids = [draw_ids(rng, self.tokens, self.top_k, self.topology, 1.5) for _ in range(8)]
        ids[self.rank][:: seed + 2] = -1
        plan = plan_of(ids, self.topology)
        self.ids.copy_(ids[self.rank])
        self.loads.copy_(torch.tensor(plan.loads))
        return plan

    def run(self):
        counts = self.control.count(self.ids)
        plan = self.control.plan(self.loads)
        return counts, plan, self.control.reroute(self.ids, counted=True)

    def assert_same(self, results, expected):
        counts, plan, routes = results
        assert counts.tolist() == expected.loads[self.rank].tolist()
        assert_same_plan(plan.to_host(), expected)
        assert_same_routes(routes, self.ids.cpu(), expected, self.rank)
        self.control.check()


def test_a_graph_makes_new_plans_of_new_inputs():
    step = Step()
    expected = step.draw(0)
    step.assert_same(step.run(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = step.run()
    digests = set()
    for seed in range(6):
        expected = step.draw(seed)
        graph.replay()
        step.assert_same(actual, expected)
        digests.add(expected.digest())
    assert len(digests) == 6


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_a_graph_keeps_the_speeds_of_its_capture(topology, config):
    slow = replace(config, speeds=(800, *[1000] * (topology.ranks - 1)))
    for captured, later in ((config, slow), (slow, config)):
        control = DevicePlanner(topology, captured, rows=0, device=CUDA)
        loads = torch.zeros(topology.ranks, topology.experts, dtype=torch.int64, device=CUDA)
        control.plan(loads)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan = control.plan(loads)
        control.use(later)
        for seed in range(4):
            numbers = random_loads(topology, seed)
            loads.copy_(torch.tensor(numbers))
            graph.replay()
            assert_same_plan(plan.to_host(), ultraep.plan(numbers, topology, captured))
        control.check()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_running_step_waits_for_nothing():
    step = Step()
    expected = step.draw(0)
    step.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step.assert_same(actual, expected)
