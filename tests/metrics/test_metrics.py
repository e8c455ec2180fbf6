"""Metrics: what the runtimes count, the values of a reading, and exporters."""

import json
import logging
import re
import socket
import urllib.request
from dataclasses import replace
from unittest.mock import Mock, call

import pytest
from dense import Example

import ultraep
from ultraep import BalanceConfig, Balancer, ConfigError
from ultraep.metrics import DASHBOARD, Exporter, Log, Metrics, scalars, serve
from ultraep.metrics.exporters import FIGURES

SUFFIXES = {"summary": ("_sum", "_count"), "counter": ("_total",), "gauge": ("",)}
EXPORTED = {figure.full_name + end for figure in FIGURES for end in SUFFIXES[figure.kind]}


# -- counting ------------------------------------------------------------------------------------


def train(balancer, example, metrics, layers=2, steps=3):
    modules = [example.layer(balancer) for _ in range(layers)]
    for _ in range(steps):
        x = example.inputs[balancer.rank].clone().requires_grad_()
        for layer in modules:
            x = x + layer(x)
        x.sum().backward()
        metrics.step()


def test_a_reading_equals_the_stats():
    def work(comm):
        example = Example(tokens=[20, 12], experts=8, top_k=2)
        balancer, readings = Balancer(comm, experts=8), []
        metrics = Metrics(balancer, every=3).tell(readings.append)
        train(balancer, example, metrics)
        (reading,) = readings
        assert reading.step == 3
        stats = balancer.stats()
        seconds = {f"seconds/{stage}": total / 6 for stage, total in stats["seconds"].items()}
        figures = {name: stats[name] for name in reading.values.keys() & stats.keys()}
        assert len(figures) == 7
        assert reading.values == pytest.approx(figures | seconds | {"skipped": 0.0})
        again = metrics.read().values
        assert (again["microbatches"], again["imbalance_after"], again["copies"]) == (0, 1.0, 0)

    ultraep.LocalGroup(2).run(work)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda b: Metrics(b, every=0), "every must be at least 1, got 0"),
        (lambda _: Metrics(), "at least one balancer, got none"),
        (
            lambda b: Metrics(b, Balancer("alone", experts=4, policy="none")),
            "must have one policy, got none and ultraep",
        ),
        (lambda _: scalars(7), "add_scalar or log"),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make(Balancer("alone", experts=4))


def test_speeds_of_ranks_are_exported():
    client = pytest.importorskip("prometheus_client")

    def work(comm):
        config = BalanceConfig(objective="balance", speeds=(1000, 800))
        metrics = Metrics(Balancer(comm, experts=4, config=config))
        return metrics.read()

    reading = ultraep.LocalGroup(2).run(work)[0]
    assert reading.values["speed/1"] == 0.8
    registry = client.CollectorRegistry()
    Exporter(registry)(reading)
    page = client.generate_latest(registry).decode()
    assert 'ultraep_rank_speed{rank="1"} 0.8' in page


# -- exporters -----------------------------------------------------------------------------------


@pytest.fixture
def reading():
    balancer, example = Balancer("alone", experts=4), Example(tokens=[20], experts=4)
    metrics = Metrics(balancer, every=1)
    train(balancer, example, metrics, layers=1, steps=2)
    return metrics.read()


def test_the_log_has_a_line_per_reading(reading, caplog):
    with caplog.at_level(logging.INFO, logger="ultraep"):
        Log()(replace(reading, step=7))
    assert "step 7: imbalance 1.000 -> 1.000 (worst 1.000), 0 replicas" in caplog.text


def test_scalars_reach_writers_runs_and_functions(reading):
    writer, run, function = Mock(spec=["add_scalar"]), Mock(spec=["log"]), Mock(spec=["__call__"])
    for target in (writer, run, function):
        scalars(target)(reading)
    values = {f"ultraep/{name}": value for name, value in reading.values.items()}
    assert writer.add_scalar.mock_calls == [call(name, value, 2) for name, value in values.items()]
    run.log.assert_called_once_with(values, step=2)
    function.assert_called_once_with(values, 2)


def test_the_prometheus_page_shows_the_last_reading(reading):
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()

    def page():
        lines = client.generate_latest(registry).decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line[0] != "#")
        return {name: float(value) for name, _, value in pairs}

    exporter = Exporter(registry)
    assert page() == {}
    exporter(reading)
    shown = page()
    assert shown['ultraep_imbalance_after_count{policy="ultraep"}'] == 2
    assert shown["ultraep_microbatches_skipped_total"] == reading.totals.skipped
    assert shown['ultraep_stage_seconds_total{stage="experts"}'] > 0
    assert {name.partition("{")[0] for name in shown} <= EXPORTED
    exporter(replace(reading, rank=1))  # rank 0 exports the figures of the group
    assert not any(name.startswith("ultraep_copies") for name in page())
    assert "ultraep_weights_sent_bytes_total" in page()
    exporter.close()
    assert page() == {}


def test_serve_listens_on_this_machine_only(reading):
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        with pytest.raises(ultraep.CommunicationError, match=f"metrics at 127.0.0.1:{port}: "):
            serve(port)
    serve(port)(reading)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        assert b"ultraep_copies_planned_total" in reply.read()
    with pytest.raises(OSError, match=r"refused|reach|assign|time"):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_the_dashboard_uses_exported_names():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert set(re.findall(r"ultraep_\w+", " ".join(expressions))) == EXPORTED
