"""Learnt speeds: found and forgotten in time, stable under noise, and equal on all ranks."""

from functools import partial
from threading import Barrier

import numpy as np
import pytest
import torch
from dense import Example, assert_close, gradients_of
from mapped_ranks import mapped_rank
from microbatches import planned
from ranks import shared_pool
from torch.utils.checkpoint import checkpoint

import ultraep
from ultraep import BalanceConfig, Balancer, ConfigError, LocalGroup, Topology, read_trace
from ultraep.backends.triton.device import interpreted
from ultraep.passes import Passes, PassRecord
from ultraep.runtime import speeds as speeds_module
from ultraep.runtime.speeds import BLOCK, Speeds, next_speeds, relative_speeds
from ultraep_tools.replay import differing

pytestmark = pytest.mark.usefixtures("one_thread")

AUTO = BalanceConfig(objective="balance", speeds="auto")
RANKS = 4
LIMIT = 200  # microbatches until speeds are found, or forgotten


class FakeCosts:
    """Predicts one second for every microbatch."""

    def predicted_seconds(self, _layer, rows_G):
        assert rows_G.sum() > 0
        return 1.0


class Group:
    """The learners of all ranks, without the rest of a balancer. Layers run one after the other.

    seconds: of a pass.
    """

    def __init__(self, monkeypatch, ranks=RANKS, layers=1, seconds=0.2):
        self.now, self.seconds = 0.0, seconds
        monkeypatch.setattr(speeds_module, "monotonic", lambda: 1.0 + self.now)
        self.learners = [Speeds(rank, FakeCosts()) for rank in range(ranks)]
        topology = Topology(ranks=ranks, experts=ranks)
        loads = np.ones((ranks, ranks), dtype=np.int64)
        self.plan = ultraep.plan(loads, topology, BalanceConfig(policy="none"))
        self.layers, self.step = layers, 0

    def run(self, seconds_R):
        """Run one pass in which stage 6 takes this long; return the speeds that it used."""
        self.now += self.seconds
        for layer in range(self.layers):
            self.step += 1
            passes = Passes(layer, self.step)
            reports = [learner.report(passes) for learner in self.learners]
            for learner, seconds in zip(self.learners, seconds_R, strict=True):
                if None not in reports:
                    learner.gathered(np.array(reports))
                record = PassRecord(passes, "forward")
                record.plan, record.seconds = self.plan, {"experts": seconds}
                learner.add(record)
        current = {learner.current for learner in self.learners}
        assert len(current) == 1
        return current.pop()


def noise(rng, count, seconds, ranks=RANKS):
    """[count, ranks] times of equal ranks on a busy machine; microbatches take `seconds`.

    As recorded on two busy cores: every time varies by 6 %. A program that competes for a core
    doubles two in five times of the rank on that core; it runs for about two seconds and at most
    eight, again and again, so that a rank has company for a quarter of the time. All ranks drift
    together by 10 %.
    """
    times = rng.lognormal(0.0, 0.06, (count, ranks))
    for rank in range(ranks):
        begin = 0
        while begin < count:
            begin += round(rng.exponential(6.0) / seconds)
            end = begin + round(min(8.0, rng.exponential(2.0)) / seconds)
            of_burst = times[begin:end, rank]
            of_burst[rng.random(len(of_burst)) < 0.4] *= 2
            begin = end
    return times * (1 + 0.1 * np.sin(np.arange(count) / 700))[:, None]


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("seconds", [0.05, 0.2])
def test_equal_ranks_stay_equal_on_a_noisy_machine(monkeypatch, seed, seconds):
    group, rng = Group(monkeypatch, seconds=seconds), np.random.default_rng(seed)
    used = {group.run(seconds_R) for seconds_R in noise(rng, 10_000, seconds)}
    assert used == {()}


@pytest.mark.parametrize("ratio", [0.6, 0.8, 0.9])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_rank_is_found_in_time_and_forgotten_again(monkeypatch, ratio, layers):
    group, rng = Group(monkeypatch, layers=layers), np.random.default_rng(0)
    begin, end = 177, 577
    times = rng.lognormal(0.0, 0.06, (end + LIMIT, RANKS))
    times[rng.random(times.shape) < 0.02] *= 2
    times[begin:end, 2] /= ratio
    used = [group.run(seconds_R) for seconds_R in times]
    assert used[:begin] == [()] * begin
    used_by = np.array(used[begin + LIMIT])
    assert used_by[2] / np.delete(used_by, 2).mean() == pytest.approx(ratio, rel=0.03)
    assert used[-1] == ()


@pytest.mark.parametrize("lasts", [10, 60])
def test_ten_seconds_are_noise_and_a_minute_is_not(monkeypatch, lasts):
    group, rng = Group(monkeypatch, seconds=0.02), np.random.default_rng(0)
    times = rng.lognormal(0.0, 0.06, (7000, RANKS))
    times[2000 : 2000 + lasts * 50, 1] /= 0.8
    used = [group.run(seconds_R) for seconds_R in times]
    assert used[-1] == ()
    found = next((number for number, speeds in enumerate(used) if speeds), None)
    assert found is None if lasts == 10 else 20 <= (found - 2000) * 0.02 <= 28


def test_a_fast_rank_that_gains_little_changes_nothing():
    assert next_speeds((), (1000, 1000, 1000, 1030)) == ()
    assert next_speeds((), (1000,) * 7 + (1100,)) == ()
    assert next_speeds((), (1000, 1000, 1000, 2000)) == (1000, 1000, 1000, 2000)


def test_speeds_are_limited_to_what_plans_accept():
    assert relative_speeds([1, 10**9]) == (1000, 100)
    assert relative_speeds([1, 10**9, 10**9]) == (4000, 1000, 1000)
    assert BalanceConfig(speeds=relative_speeds([1, 10**9, 10**9, 10**15])).speeds


def slowed(monkeypatch, paces, block=4):
    few = {"REMEMBERED": 3, "AGREEING": 2, "FEWEST": 2, "SAMPLES": 1}
    for name, value in {"BLOCK": block, "SPAN_OF_CPU": 0.0, **few}.items():
        monkeypatch.setattr(speeds_module, name, value)
    add = Speeds.add

    def fake(self, record):
        if record.kind == "forward" and "experts" in record.seconds:
            rows_G = speeds_module.rows_of_groups(record.plan, self._rank)
            predicted = self._cost.predicted_seconds(record.layer, rows_G)
            record.seconds["experts"] = paces[self._rank] * predicted
        add(self, record)

    monkeypatch.setattr(Speeds, "add", fake)


def test_all_ranks_use_new_speeds_from_the_same_microbatch_on(monkeypatch, tmp_path):
    paces, changed = [1.0, 1.0, 1.25], []
    slowed(monkeypatch, paces)
    example = Example([30, 30, 30], experts=6, skew=0.3)

    def work(comm):
        record = tmp_path / "run"
        balancer = Balancer(comm, experts=6, slots=2, config=AUTO, record=record)
        layers = [example.layer(balancer) for _ in range(2)]
        used = []
        with torch.no_grad():
            for step in range(60):
                if comm.rank == 0 and step == 30:
                    paces[2] = 1.0
                for layer in layers:
                    layer(example.inputs[comm.rank])
                    used.append((layer.last_plan.digest(), layer.last_plan.speeds))
        stats = balancer.stats()
        changed.append(balancer.speeds)
        balancer.close()
        return used, stats["speeds"], stats["measured_speeds"]

    first, *others = LocalGroup(3).run(work)
    assert all(other == first for other in others)
    used, speeds, measured = first
    assert speeds == ()
    assert measured == (1000, 1000, 1000)
    sets = [speeds for _, speeds in used]
    assert set(sets) == {(), (1000, 1000, 800)}
    assert sets[0] == sets[-1] == ()
    trace = read_trace(tmp_path / "run")
    assert [trace.speeds_of(n) or () for n in range(len(trace))] == sets
    assert differing(trace) == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_pass_gets_the_plan_of_its_first_pass(monkeypatch, reentrant):
    """Speeds change between steps; gradients equal those without speeds and recomputation."""
    paces = [1.0, 1.6]
    slowed(monkeypatch, paces, block=2)
    example, together = Example([24, 20], experts=4), Barrier(2)

    def work(comm, config, around):
        balancer = Balancer(comm, experts=4, slots=2, config=config)
        layers = [example.layer(balancer) for _ in range(2)]
        optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.0)
        digests, gradients = [], []
        for step in range(12):
            if comm.rank == 1:  # the rank itself: others are at another step
                paces[1] = 1.6 if step < 6 else 1.0
            passes = []
            for _ in range(2):  # gradients are accumulated
                x = example.inputs[comm.rank].clone().requires_grad_()
                y = x
                for layer in layers:
                    y = y + around(layer, y)
                passes.append((x, y, balancer.speeds))
            for _, y, speeds in passes:
                y.sum().backward()
                digests.append((speeds, balancer.speeds))
            gradients = gradients_of(torch.nn.ModuleList(layers), passes[0][0])
            together.wait()  # steps are counted per process, and these ranks share one
            optimizer.step()
            optimizer.zero_grad()
            together.wait()
        return digests, gradients

    again = partial(checkpoint, use_reentrant=reentrant)
    learnt = LocalGroup(2).run(partial(work, config=AUTO, around=again))
    plain = LocalGroup(2).run(
        partial(work, config=BalanceConfig(policy="none"), around=lambda layer, y: layer(y))
    )
    for (digests, gradients), (_, expected) in zip(learnt, plain, strict=True):
        assert all(before == after for before, after in digests)
        assert len({before for before, _ in digests}) > 1
        assert gradients.keys() == expected.keys()
        for name in gradients:
            assert_close(gradients[name], expected[name])


def test_speeds_need_times_of_experts(monkeypatch, caplog):
    monkeypatch.setattr(speeds_module, "SILENT", 5)

    def work(comm):
        balancer = Balancer(comm, experts=4, config=AUTO)
        ids = torch.zeros(8, 1, dtype=torch.int64)
        for _ in range(2 * BLOCK):
            planned(balancer, ids)
        return balancer.speeds, balancer.measured_speeds

    assert LocalGroup(2).run(work) == [((), ())] * 2
    assert caplog.text.count("speeds='auto' learns nothing: rank 0 has timed no experts") == 1


def test_where_speeds_cannot_be_learnt():
    loads = np.ones((2, 2), dtype=np.int64)
    with pytest.raises(ConfigError, match="speeds='auto' works in a Balancer only"):
        ultraep.plan(loads, Topology(ranks=2, experts=2), AUTO)
    alone = Balancer("alone", experts=2, config=AUTO)
    assert alone.speeds == alone.measured_speeds == ()


def on_mapped(rank, group, steps):
    with pytest.MonkeyPatch.context() as patch:
        slowed(patch, [1.0, 1.6], block=2)
        example = Example([8, 8], experts=4, skew=0.3)
        options = {"experts": 4, "slots": 2, "config": AUTO, "capacity": 64}
        used = []
        with mapped_rank(group, **options) as balancer, torch.no_grad():
            layer = example.layer(balancer)
            for _ in range(steps):
                layer(example.inputs[rank])
                plan = layer.last_plan.to_host()
                used.append((plan.digest(), plan.speeds, plan.rank_loads.tolist()))
        return used


@pytest.mark.slow
@pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
def test_speeds_on_mapped_memory():
    first, second = shared_pool().run(2, on_mapped, 7)
    assert first == second
    assert first[0][1] == ()
    assert first[-1][1] in ((1000, 620), (1000, 630))
    fast, slow = first[-1][2]
    assert slow / fast == pytest.approx(0.62, rel=0.2)
