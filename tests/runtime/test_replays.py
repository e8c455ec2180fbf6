"""Replayed graphs in a trace: a ring on the device stores the plans, the host fetches them."""

import numpy as np
import pytest
import torch

import ultraep
from ultraep import BalanceConfig, Balancer, Recorder, Topology, read_trace
from ultraep.backends.triton.device import default_device
from ultraep.passes import Passes, PassRecord
from ultraep.reroute import rows_received
from ultraep.runtime import replays as module
from ultraep.runtime.device_planner import DevicePlanner
from ultraep.runtime.recording import Recording
from ultraep.runtime.replays import ReplayedPlans

TOPOLOGY, CONFIG = Topology(ranks=3, experts=6, slots=2), BalanceConfig(objective="balance")


def record_of(passes, plan, *sent, kind=None):
    record = PassRecord(passes, kind or passes.record.kind)
    record.passes, record.plan, record.sent = passes, plan, [(*sent, None)] * bool(sent)
    return record


class World:
    """Ranks with two layers each; `replay` stores plans as the replay of a graph would."""

    def __init__(self, folder):
        self.folder = folder
        self.recorders = [Recorder(folder, TOPOLOGY, CONFIG, rank=rank) for rank in range(3)]
        self.ranks = [
            ReplayedPlans(Recording(recorder, rank), TOPOLOGY, default_device())
            for rank, recorder in enumerate(self.recorders)
        ]
        self.control = DevicePlanner(TOPOLOGY, CONFIG, rows=600, device=default_device())
        self.rng, self.plans = np.random.default_rng(7), []
        for layer in (4, 5):
            plan, passes = self.planned(), Passes(layer, 1)
            for replays in self.ranks:
                replays.captured(record_of(passes, plan, "weights", 10))
                replays.captured(record_of(Passes(layer, 2, recomputed=True), plan))
                replays.captured(record_of(passes, plan, "gradients", 1000, kind="backward"))

    def planned(self):
        loads = self.rng.integers(0, 100, (TOPOLOGY.ranks, TOPOLOGY.experts))
        plan = self.control.plan(torch.from_numpy(loads).int().to(default_device()))
        self.plans.append(plan.to_host())
        return plan

    def replay(self, step=None):
        for replays in self.ranks if step is not None else ():
            replays.begin_step(step)
        for site in range(2):
            plan = self.planned()
            for replays in self.ranks:
                replays.ring.keep(site, plan.loads, plan.result)

    def fetch(self):
        for replays in self.ranks:
            for _ in range(3):  # how many, which, and what came meanwhile
                replays.fetch()

    def close(self):
        for replays, recorder in zip(self.ranks, self.recorders, strict=True):
            replays.finish()
            recorder.close()
        return read_trace(self.folder)


def test_every_replay_is_a_record_of_its_step(tmp_path):
    world = World(tmp_path)  # two plans, of no step
    for step in (10, 11, 12):
        world.replay(step)
        world.replay()  # a second microbatch of the step
        world.fetch()
    trace = world.close()
    keys = zip(trace.step.tolist(), trace.layer.tolist(), trace.microbatch.tolist(), strict=True)
    expected = [(0, 4, 0), (0, 5, 0)]
    expected += [(step, layer, n) for step in (10, 11, 12) for n in (0, 1) for layer in (4, 5)]
    plans = dict(zip(expected, world.plans, strict=True))
    actual = dict(zip(keys, map(trace.plan, range(len(trace))), strict=True))
    assert actual == plans
    assert (trace.dropped, trace.left_out) == (0, 0)


def test_the_bytes_of_a_replay_follow_its_plan(tmp_path):
    world = World(tmp_path)
    trace, homes = world.close(), TOPOLOGY.home_of_expert
    for place, plan in enumerate(world.plans):
        assert plan.num_replicas
        for rank in range(TOPOLOGY.ranks):
            gives = int((homes[plan.replicas[:, 0]] == rank).sum())
            hosts = int((plan.replicas[:, 1] == rank).sum())
            assert trace.bytes_moved[place, rank] == 10 * gives + 1000 * hosts
            assert rows_received(plan, rank).sum() == plan.rank_loads[rank]


@pytest.mark.parametrize("every", [1, 5])
def test_overwritten_plans_are_counted_as_dropped(tmp_path, monkeypatch, every):
    monkeypatch.setattr(module, "MEMORY", 0)
    monkeypatch.setattr(module, "FEWEST", 8)
    world = World(tmp_path)
    for step in range(20):
        world.replay(step + 1)
        if step % every == 0:
            world.fetch()
    trace = world.close()
    lost = len(world.plans) - len(trace)
    assert trace.dropped == 3 * lost
    assert (lost > 0) == (every > 1)
    assert trace.plan(len(trace) - 1) == world.plans[-1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("layers", [1, 3])
def test_a_graph_is_recorded(tmp_path, layers):
    balancer = Balancer("alone", experts=4, data_plane="mapped", record=tmp_path / "run")
    moes = [
        ultraep.BalancedMoE.swiglu(64, 64, 4, 2, balancer=balancer, seed=seed).cuda().bfloat16()
        for seed in range(layers)
    ]
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)

    def step():
        y = x
        for moe in moes:
            y = y + moe(y)
        return y

    balancer.record_step(0)
    with torch.no_grad():
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for number in range(1, 30):
            balancer.record_step(number)
            x.normal_()
            graph.replay()
    balancer.close()
    trace = read_trace(tmp_path / "run")
    assert trace.step.tolist() == [step for step in range(30) for _ in range(layers)]
    assert trace.layer.tolist() == [*range(layers)] * 30
    assert trace.dropped == 0
    assert (trace.loads.sum(axis=(1, 2)) == 32).all()
    assert len({tuple(loads.flatten().tolist()) for loads in trace.loads}) > layers * 5
