"""Metrics: what the runtimes count, what a reading says, and where it goes."""

import json
import logging
import re
import socket
import urllib.error
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
import torch
from dense import Example
from ranks import shared_pool
from shared_peers import SharedPeers

import ultraep
from ultraep import Balancer, ConfigError, Topology
from ultraep.backends.triton.device import default_device, interpreted
from ultraep.backends.triton.history import PlanSums
from ultraep.metrics import ALERTS, DASHBOARD, AlarmSettings, Log, Metrics, Telemetry, scalars
from ultraep.metrics import names as known
from ultraep.metrics.alarms import Alarms
from ultraep.metrics.hosts import is_known_host
from ultraep.metrics.meter import ORDER, Meter, Totals, add_plan
from ultraep.metrics.prometheus import Exporter, serve
from ultraep.microbatch import MicrobatchInfo
from ultraep.runtime.control import ControlPlane
from ultraep.runtime.mapped.peers import LocalPeers

DEVICE = default_device()


# -- counting ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 0, None), (2, 4, 1, None), (4, 16, 0, None), (6, 24, 2, None), (8, 8, 1, 4)],
    ids=str,
)
def test_the_kernel_counts_as_its_twin(shape):
    ranks, experts, slots, domain = shape
    topology = Topology(ranks=ranks, experts=experts, slots=slots, domain=domain)
    control = ControlPlane(topology, rows=64, device=DEVICE)
    sums = torch.zeros(len(ORDER), dtype=torch.int64, device=DEVICE)
    on_device, on_host = PlanSums(sums, topology.home_of_expert, ranks), [0] * len(ORDER)
    rng = np.random.default_rng(0)
    for most in (1, 3, 100, 0):  # the last one: no tokens at all
        loads = rng.integers(0, most + 1, (ranks, experts)) if most else np.zeros((ranks, experts))
        plan = control.plan(torch.from_numpy(loads).to(DEVICE, torch.int32))
        on_device.add(plan.num_replicas, plan.rank_loads, plan.replicas, plan.quotas)
        add_plan(on_host, plan.to_host())
        assert sums.tolist() == on_host
    assert on_host[0] == 4


def steps_of(balancer, example, metrics, layers=2, steps=3):
    """Some steps of training."""
    made = [example.layer(balancer) for _ in range(layers)]
    for _ in range(steps):
        x = example.inputs[balancer.rank].clone().requires_grad_()
        for layer in made:
            x = x + layer(x)
        x.sum().backward()
        metrics.step()


def as_stats_say(values, stats):
    for name in (known.BEFORE, known.AFTER, known.WORST):
        assert values[name] == pytest.approx(stats[name], abs=2e-5), name
    for name in ("microbatches", "copies"):
        assert values[name] == stats[name], name


def test_messages_are_counted_as_stats_say():
    def work(comm):
        example = Example(tokens=[20, 12], experts=8, top_k=2)
        balancer, heard = Balancer(experts=8, communicator=comm), []
        metrics = Metrics(balancer, every=3).tell(heard.append)
        steps_of(balancer, example, metrics)
        (reading,) = heard
        assert reading.step == 3
        stats = balancer.stats()
        as_stats_say(reading.values, stats)
        for name in (known.WEIGHTS, known.GRADIENTS):
            assert reading.values[name] == stats[name]
        for stage, seconds in stats["seconds"].items():
            assert reading.values[f"seconds/{stage}"] == pytest.approx(seconds / 6)
        again = metrics.read().values
        assert (again["microbatches"], again[known.AFTER], again["copies"]) == (0, 1.0, 0)

    ultraep.LocalGroup(2).run(work)


def on_mapped(rank, group, example):
    balancer = Balancer(
        group,
        peers=SharedPeers(group),
        experts=example.experts,
        data_plane="mapped",
        capacity=2 * 20 * example.top_k,
        timeout=60.0,
    )
    metrics = Metrics(balancer, every=2)
    steps_of(balancer, example, metrics, layers=1, steps=2)
    found, stats = metrics.read(), balancer.stats()
    balancer.close()
    return found.totals.__dict__ | {"seconds": dict(found.totals.seconds)}, stats


@pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
def test_the_mapped_plane_is_counted_on_the_device():
    example = Example(tokens=[20, 12], experts=4, top_k=2, dtype=torch.float32)
    found = shared_pool().run(2, on_mapped, example)
    for totals, stats in found:
        assert totals["microbatches"] == stats["microbatches"] == 2
        assert totals["copies"] == stats["copies"]
        assert totals["after"] / 2 == pytest.approx(stats["imbalance_after"], abs=2e-5)
        assert totals["before"] / 2 == pytest.approx(stats["imbalance_before"], abs=2e-5)
        assert set(totals["seconds"]) == set(stats["seconds"])
    sent = [sum(stats[name] for _, stats in found) for name in (known.WEIGHTS, known.GRADIENTS)]
    assert sent[0] > 0
    for totals, _ in found:  # each tells an equal part
        assert [2 * totals["weights"], 2 * totals["gradients"]] == sent


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_replays_of_a_graph_are_counted():
    torch.cuda.init()
    peers = LocalPeers(1).of(0)
    balancer = Balancer(peers=peers, experts=4, data_plane="mapped", tokens=16)
    metrics = Metrics(balancer)
    moe = ultraep.BalancedMoE.swiglu(64, 64, 4, 2, balancer=balancer).cuda().bfloat16()
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        moe(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            moe(x)
        for _ in range(5):
            graph.replay()
    assert metrics.read().totals.microbatches == 6


def test_a_backward_pass_whose_forward_was_not_seen_is_not_counted():
    meter, totals = Meter(Topology(ranks=2, experts=4)), Totals()
    meter.sent(MicrobatchInfo(0, 1, again=False, back=True), "gradients", 8, None)
    meter.fetch().add_to(totals)
    assert (totals.gradients, totals.microbatches) == (0, 0)


def test_readings_that_come_late_are_handed_out_late(monkeypatch):
    here, heard = [False], []
    metrics = Metrics(Balancer("alone", experts=4), every=2).tell(heard.append)
    monkeypatch.setattr(type(metrics._meters[0].fetch()), "here", lambda _: here[0])
    for _ in range(3):
        metrics.step()
    assert heard == []
    here[0] = True
    metrics.step()  # the first has come, and the second is asked for and there
    assert [reading.step for reading in heard] == [2, 4]


def test_what_cannot_be_measured_is_refused():
    balancer = Balancer("alone", experts=4)
    with pytest.raises(ConfigError, match="every must be at least 1, got 0"):
        Metrics(balancer, every=0)
    with pytest.raises(ConfigError, match="at least one balancer, got none"):
        Metrics()
    with pytest.raises(ConfigError, match="one policy at a time, got none and ultraep"):
        Metrics(balancer, Balancer("alone", experts=4, policy="none"))
    with pytest.raises(ConfigError, match=re.escape("high must be above 1, got 1.0")):
        AlarmSettings(high=1.0)
    with pytest.raises(ConfigError, match="patience must be at least 1, got 0"):
        AlarmSettings(patience=0)
    with pytest.raises(ConfigError, match="add_scalar or log"):
        scalars(7)


# -- alarms --------------------------------------------------------------------------------------


def values(before, after, skipped):
    return {"microbatches": 8, known.BEFORE: before, known.AFTER: after, known.SKIPPED: skipped}


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (values(2.0, 1.01, 0.0), set()),
        (values(2.0, 1.5, 0.0), {"imbalance_high"}),
        (values(1.15, 1.15, 1.0), {"balancing_skipped"}),
        (values(1.5, 1.5, 1.0), {"balancing_skipped", "imbalance_high"}),
        (values(1.02, 1.02, 1.0), set()),  # nothing to gain
        (values(1.15, 1.15, 0.9), set()),  # now and then there is a copy
    ],
    ids=["balanced", "stays high", "skipped", "both", "nothing to gain", "some copies"],
)
def test_alarms_mean_one_thing_each(seen, expected):
    alarms = Alarms(AlarmSettings(patience=3), balancing=True)
    assert [set(alarms.look(seen)) for _ in range(3)] == [set(), set(), expected]
    assert alarms.look(values(1.0, 1.0, 0.0)) == {}
    assert alarms.look(seen) == {}  # and patience begins anew
    off = Alarms(AlarmSettings(patience=1), balancing=False)
    assert off.look(seen) == {}


def test_the_log_has_a_line_for_every_reading_and_tells_of_alarms_once(caplog):
    balancer = Balancer("alone", experts=4)
    example = Example(tokens=[20], experts=4)
    metrics = Metrics(balancer, every=1).tell(Log())
    with caplog.at_level(logging.INFO, logger="ultraep"):
        steps_of(balancer, example, metrics, layers=1, steps=1)
    assert "step 1: imbalance 1.000 -> 1.000 (worst 1.000), 0 copies" in caplog.text
    assert "100% left alone" in caplog.text
    log, reading = Log(), metrics.read()
    caplog.clear()
    for alarms in ({"imbalance_high": "because"}, {"imbalance_high": "because"}, {}):
        log(ultraep.metrics.Reading(7, 0, "ultraep", reading.values, reading.totals, alarms))
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert told == [
        "ultraep: imbalance_high: because",
        "ultraep: imbalance_high: is over at step 7",
    ]


# -- where it goes -------------------------------------------------------------------------------


@pytest.fixture
def reading():
    balancer, example = Balancer("alone", experts=4), Example(tokens=[20], experts=4)
    metrics = Metrics(balancer, every=1)
    steps_of(balancer, example, metrics, layers=1, steps=2)
    return metrics.read()


def test_scalars_reach_all_three_kinds_of_target(reading):
    class Writer:
        def __init__(self):
            self.found = {}

        def add_scalar(self, name, value, step):
            self.found[name] = value, step

    class Run:
        def log(self, values, step):
            self.found = {name: (value, step) for name, value in values.items()}

    writer, run, found = Writer(), Run(), {}
    for target in (writer, run, lambda values, step: found.update(values)):
        scalars(target)(reading)
    assert writer.found == run.found == {name: (value, 2) for name, value in found.items()}
    assert found["ultraep/imbalance_after"] == reading.values[known.AFTER]
    assert "ultraep/skipped" in found


def samples(page):
    pairs = (line.rpartition(" ") for line in page if line[0] != "#")
    return {name: float(value) for name, _, value in pairs}


def test_the_page_of_prometheus_has_the_last_reading(reading):
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    exporter = Exporter(registry)
    assert client.generate_latest(registry) == b""
    exporter(reading)
    page = samples(client.generate_latest(registry).decode().splitlines())
    assert page['ultraep_imbalance_after_count{policy="ultraep"}'] == 2
    assert page["ultraep_microbatches_skipped_total"] == reading.totals.skipped
    assert page['ultraep_alarm{alarm="imbalance_high"}'] == 0
    assert page['ultraep_stage_seconds_total{stage="experts"}'] > 0
    names = {name.partition("{")[0] for name in page}
    assert names <= {name for figure in known.EXPORTED for name in figure.samples}
    exporter(replace(reading, rank=1))  # whose plans are those of rank 0
    page = samples(client.generate_latest(registry).decode().splitlines())
    assert not any(name.startswith("ultraep_copies") for name in page)
    assert "ultraep_weights_sent_bytes_total" in page
    exporter.close()
    assert client.generate_latest(registry) == b""


def test_a_page_of_its_own_is_served(reading):
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        with pytest.raises(ultraep.CommunicationError, match=f"127.0.0.1:{port} cannot be served"):
            serve(port)
    exporter = serve(port)
    exporter(reading)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        assert b"ultraep_copies_planned_total" in reply.read()
    ask = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Host": "evil.test"})
    with pytest.raises(urllib.error.HTTPError, match="421"):
        urllib.request.urlopen(ask, timeout=30)


@pytest.mark.parametrize(
    ("host", "local", "beyond"),
    [
        *(("localhost", True, True), ("LOCALHOST:99", True, True), ("127.0.0.1:80", True, True)),
        *(("[::1]:9464", True, True), ("gpu-3:9464", True, True), ("10.0.0.7", False, True)),
        *(("evil.example", False, False), ("127.0.0.1@evil", False, False), ("", False, False)),
    ],
)
def test_a_server_answers_under_names_of_this_machine(host, local, beyond):
    assert is_known_host([host], {"gpu-3"}, local=True) == local
    assert is_known_host([host], {"gpu-3"}, local=False) == beyond
    assert not is_known_host([host, host], {"gpu-3"}, local=True)


def test_telemetry_shows_the_last_reading(reading):
    metrics = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    telemetry = Telemetry(metrics.MeterProvider([reader]).get_meter("test"))
    telemetry(reading)
    scope = reader.get_metrics_data().resource_metrics[0].scope_metrics[0]
    found = {metric.name: metric.data.data_points for metric in scope.metrics}
    assert found["ultraep_imbalance_after"][0].value == reading.values[known.AFTER]
    assert found["ultraep_microbatches_skipped"][0].value == reading.totals.skipped


def test_dashboard_and_rules_use_known_names():
    exported = {name for figure in known.EXPORTED for name in figure.samples}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    used = set(re.findall(r"ultraep_\w+", " ".join(expressions)))
    assert used == exported
    rules = re.findall(r"(ultraep_\w+)[\[{]", ALERTS.read_text())
    assert set(rules) <= exported
    assert len(re.findall(r"- alert:", ALERTS.read_text())) == 2
