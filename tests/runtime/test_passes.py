"""Records of passes: what subscribers receive from a device that is far behind the host."""

import time
from unittest.mock import Mock

import pytest
import torch
from dense import Example

from ultraep import Balancer, read_trace
from ultraep import passes as passes_module
from ultraep.microbatch import Layer
from ultraep.passes import TIMED, Passes, PassLog
from ultraep.trace.schema import BACKWARD, FORWARD


class LateEvent:
    """An event that is complete only after a wait."""

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self, _stream):
        self.when = time.perf_counter()

    def query(self):
        return False

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 1000 * (other.when - self.when)


@pytest.fixture(autouse=True)
def far_behind(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    begin = PassLog.begin
    monkeypatch.setattr(
        PassLog, "begin", lambda log, passes, kind, _: begin(log, passes, kind, Mock(type="cuda"))
    )


def test_late_reports_belong_to_their_steps(tmp_path):
    example = Example(tokens=[20], experts=4)
    balancer = Balancer("alone", experts=4, record=tmp_path / "run")
    layers = [example.layer(balancer) for _ in range(2)]
    for step in (10, 20, 30):
        balancer.record_step(step)
        x = example.inputs[0].clone().requires_grad_()
        for layer in layers:
            x = x + layer(x)
        time.sleep(0.01)  # between forward and backward
        x.sum().backward()
    stats = balancer.stats()
    balancer.close()
    assert stats["microbatches"] == 6
    assert set(stats["seconds"]) == {*FORWARD, *BACKWARD} - {"recompute", "reduce"}
    trace = read_trace(tmp_path / "run")
    assert trace.step.tolist() == [10, 10, 20, 20, 30, 30]
    assert trace.layer.tolist() == [0, 1, 0, 1, 0, 1]
    assert (trace.began < trace.back_began).all()


def test_an_even_share_of_microbatches_is_timed_for_any_number_of_layers():
    log = PassLog(rank=0)
    assert log.times(1)
    for layers in (1, 7, 8, 32, 61, 64):
        steps = range(1, 1 + 50 * TIMED * layers)
        for layer in {0, layers // 2, layers - 1}:
            timed = sum(map(log.times, steps[layer::layers]))
            assert 25 <= timed <= 100, (layers, layer, timed)


def test_seconds_are_extrapolated_from_timed_microbatches():
    example = Example(tokens=[20], experts=4)
    balancer = Balancer("alone", experts=4)
    balancer.log.every = 4
    layer, seen = example.layer(balancer), []
    for _ in range(20):
        layer(example.inputs[0])
        seen.append(balancer.stats())
    assert seen[-1]["microbatches"] == 20
    assert 4 <= seen[-1]["timed"] <= 6
    assert seen[0]["timed"] == 1
    assert seen[1]["seconds"]["plan"] == pytest.approx(2 * seen[0]["seconds"]["plan"])


def test_subscribers_get_every_pass_once_and_in_order():
    """Also passes that do not end, and backward passes that send no gradients to tokens."""
    example, records = Example(tokens=[20], experts=4), []
    balancer = Balancer("alone", experts=4)

    def subscriber(record):
        assert record.plan.total == 40
        records.append((record.kind, record.step, *(stage for stage, _ in record.timeline)))

    balancer.subscribe(subscriber)
    layer = example.layer(balancer)
    layer.router.requires_grad_(False)
    layer(example.inputs[0]).sum().backward()
    layer(example.inputs[0].clone().requires_grad_()).sum().backward()
    ids = torch.zeros(40, 1, dtype=torch.int64)
    microbatch = balancer.begin(Layer(0), ids)
    microbatch.count()
    microbatch.plan()
    assert records == []
    balancer.settle()
    forward = *FORWARD[:-2], "experts", "combine", ""
    assert [record[:2] for record in records] == [
        ("forward", 0),
        ("backward", 0),
        ("forward", 1),
        ("backward", 1),
        ("forward", 2),
    ]
    assert records[0][2:] == records[2][2:] == forward
    assert records[1][-3:] == ("weights again", "experts back", "")
    assert records[3][-3:] == ("experts back", "dispatch back", "")
    assert records[4][2:] == ("loads", "plan", "verify", "")


def test_a_warning_says_once_that_passes_of_graphs_are_not_recorded(monkeypatch, tmp_path, caplog):
    example, records = Example(tokens=[20], experts=4), []
    balancer = Balancer("alone", experts=4, record=tmp_path / "run")
    balancer.subscribe(records.append)
    layer = example.layer(balancer)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(2):
        layer(example.inputs[0]).sum().backward()
    balancer.close()
    assert caplog.text.count("microbatches of replayed CUDA graphs are not recorded") == 1
    assert records == []
    assert balancer.stats()["microbatches"] == len(read_trace(tmp_path / "run")) == 0


def test_a_pass_is_finished_when_its_plan_has_arrived(monkeypatch):
    """The event after which a pass is delivered comes after the copy of its plan."""
    order, log = [], PassLog(rank=0)
    monkeypatch.setattr(passes_module, "_event", lambda: order.append("event"))
    passes = Passes(0, 1, log)
    passes.record.plan = Mock(to_host_async=lambda: order.append("copy"))
    passes.record.at("combine")
    passes.record.end()
    assert order[-2:] == ["copy", "event"]
