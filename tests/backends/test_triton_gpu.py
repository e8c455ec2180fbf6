"""The kernels on a GPU: compiled, captured in graphs, without synchronisation."""

import numpy as np
import pytest
import torch
from cases import assert_same_plan, distinct_ids, draw_ids, plan_of

import ultraep
from ultraep import BalanceConfig, Rates, Topology, workload
from ultraep.reroute import reroute, reroute_dense
from ultraep.runtime.control import ControlPlane

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
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
    "few copies": BalanceConfig(rates=Rates(row=1000, each=5000), tolerance=0.02),
}


def random_loads(topology, seed):
    """Flat or skewed loads, few or many rows."""
    rng = np.random.default_rng(seed)
    shape = (topology.ranks, topology.experts)
    liked = np.exp(rng.normal(0, rng.choice([0.0, 0.5, 1.0, 2.0, 4.0]), topology.experts))
    scale = rng.choice([0.3, 3, 30, 3000]) / liked.mean()
    return rng.poisson(liked * scale, shape)


def assert_same_routes(found, wanted):
    sent = len(wanted.order)
    assert found.slots.tolist() == wanted.slots.tolist()
    assert found.order.tolist() == wanted.order.tolist() + [-1] * (wanted.num_rows - sent)
    assert found.send_counts.tolist() == wanted.send_counts
    assert found.receive_counts.tolist() == wanted.receive_counts.tolist()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_random_plans(topology, config):
    control = ControlPlane(topology, config, rows=0, device=CUDA)
    for seed in range(50):
        loads = random_loads(topology, seed)
        found = control.plan(torch.tensor(loads, device=CUDA)).to_host()
        assert_same_plan(found, ultraep.plan(loads, topology, config))
    control.check()


@pytest.mark.parametrize(
    "config",
    [BalanceConfig(), BalanceConfig(tolerance=0.01), CONFIGS["few links"]],
    ids=["exact", "loose", "few links"],
)
def test_a_plan_of_1024_ranks(config):
    topology = Topology(ranks=1024, experts=4096)
    control = ControlPlane(topology, config, rows=0, device=CUDA)
    for seed in range(3):
        loads = workload.zipf(1024, 4096, ratio=3.0, tokens=512, shuffled=True, seed=seed)
        found = control.plan(torch.tensor(loads, device=CUDA)).to_host()
        assert_same_plan(found, ultraep.plan(loads, topology, config))


class Step:
    """One rank's step with inputs at fixed addresses, as a graph needs them."""

    def __init__(self, tokens=3000, top_k=4, rank=3):
        self.topology, self.rank = Topology(ranks=8, experts=32, slots=2), rank
        self.tokens, self.top_k = tokens, top_k
        self.control = ControlPlane(self.topology, rows=tokens * top_k, rank=rank, device=CUDA)
        self.ids = torch.zeros(tokens, top_k, dtype=torch.int64, device=CUDA)
        self.loads = torch.zeros(8, 32, dtype=torch.int32, device=CUDA)

    def draw(self, seed):
        """Draw other ids and loads; return the plan and routes that the host makes for them."""
        rng = np.random.default_rng(seed)
        ids = [draw_ids(rng, self.tokens, self.top_k, self.topology, 1.5) for _ in range(8)]
        ids[self.rank][:: seed + 2] = -1
        plan = plan_of(ids, self.topology)
        self.ids.copy_(ids[self.rank])
        self.loads.copy_(torch.tensor(plan.loads))
        return plan, reroute(ids[self.rank], plan, self.rank)

    def run(self):
        counts = self.control.count(self.ids)
        plan = self.control.plan(self.loads)
        return counts, plan, self.control.reroute(self.ids, counted=True)

    def assert_same(self, found, wanted):
        (counts, plan, routes), (wanted_plan, wanted_routes) = found, wanted
        assert counts.tolist() == wanted_plan.loads[self.rank].tolist()
        assert_same_plan(plan.to_host(), wanted_plan)
        assert_same_routes(routes, wanted_routes)
        assert int(routes.receive_counts.sum()) == wanted_plan.rank_loads[self.rank]
        self.control.check()


def test_a_graph_makes_new_plans_of_new_inputs():
    step = Step()
    wanted = step.draw(0)
    step.assert_same(step.run(), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step.run()
    digests = set()
    for seed in range(6):
        wanted = step.draw(seed)
        graph.replay()
        step.assert_same(found, wanted)
        digests.add(wanted[0].digest())
    assert len(digests) == 6


def test_a_running_step_allocates_nothing():
    step = Step()
    step.draw(0)
    step.run()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        step.run()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_running_step_waits_for_nothing():
    step = Step()
    wanted = step.draw(0)
    step.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step.assert_same(found, wanted)


def test_the_same_step_gives_the_same_bits():
    step = Step()
    step.draw(5)
    runs = []
    for _ in range(3):
        counts, plan, routes = step.run()
        tensors = (counts, plan.result, routes.slots, routes.order, routes.positions)
        runs.append([tensor.cpu().clone() for tensor in tensors])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, runs[0], strict=True))


def test_a_step_in_another_stream():
    step = Step()
    wanted = step.draw(1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = step.run()
    torch.cuda.current_stream().wait_stream(stream)
    step.assert_same(found, wanted)


@pytest.mark.parametrize("rows", [0, 1, 511, 512, 513, 70_000])
def test_routes_of_any_length(rows):
    topology = Topology(ranks=8, experts=32, slots=2)
    rng = np.random.default_rng(rows)
    ids = [draw_ids(rng, rows, 1, topology, 2.0) for _ in range(8)]
    plan = plan_of(ids, topology)
    control = ControlPlane(topology, rows=rows, rank=5, device=CUDA)
    control.plan(torch.tensor(plan.loads, device=CUDA))
    wanted = reroute(ids[5], plan, 5)
    mine = ids[5].to(CUDA)
    assert_same_routes(control.reroute(mine), wanted)
    assert_same_routes(control.reroute(mine, in_place=True), wanted)
    assert mine.tolist() == wanted.slots.tolist()
    control.check()


@pytest.mark.parametrize("tokens", [0, 1, 64, 65, 5000])
def test_maps_of_any_length(tokens):
    topology = Topology(ranks=4, experts=96, slots=2)
    rng = np.random.default_rng(tokens)
    ids = [distinct_ids(rng, tokens, 4, topology) for _ in range(4)]
    plan = plan_of(ids, topology)
    chosen = torch.zeros(tokens, 96, dtype=torch.bool).scatter(1, ids[1], True)
    host = torch.rand(tokens, 96, dtype=torch.float64).requires_grad_()
    mine = host.detach().to(CUDA).requires_grad_()
    control = ControlPlane(topology, rows=tokens, rank=1, device=CUDA)
    control.plan(torch.tensor(plan.loads, device=CUDA))
    slot_map, found = control.reroute_map(chosen.to(CUDA), mine)
    wanted_map, wanted = reroute_dense(chosen, host, plan, 1)
    assert torch.equal(slot_map.cpu(), wanted_map)
    assert torch.equal(found.detach().cpu(), wanted.detach())
    pull = torch.rand(found.shape, dtype=torch.float64)
    found.backward(pull.to(CUDA))
    wanted.backward(pull)
    assert torch.equal(mine.grad.cpu(), host.grad)
    control.check()


def test_invalid_ids_and_loads_are_counted():
    control = ControlPlane(Topology(ranks=2, experts=8), rows=10, device=CUDA)
    control.count(torch.tensor([[0, 8], [-2, -1]], device=CUDA))
    control.plan(torch.full((2, 8), -1, device=CUDA))
    with pytest.raises(ultraep.LoadError, match=r"2 ids must lie in 0\.\.7; 16 loads are negative"):
        control.check()
    control.check()
