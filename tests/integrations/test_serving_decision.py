"""Which batches the plug-ins for vLLM and SGLang balance: by rates, equally on all ranks."""

import logging
from types import SimpleNamespace

import pytest
import torch
from dense import Example

from ultraep import LocalGroup, Rates
from ultraep.integrations.serving.service import Service, which_batches
from ultraep.integrations.serving.settings import ServingSettings
from ultraep.runtime import cost
from ultraep.runtime.cost import MeasuredRates

EXAMPLE = Example([30, 30], experts=8)  # tokens of each rank
FEW, MANY = 50, 5_000  # tokens of a batch, as the engine tells
LIMIT = 1_000


class ServiceOfRank(Service):
    """A service of one of two ranks, whose engine is this test."""

    def __init__(self, comm, **settings):
        super().__init__(ServingSettings(**settings), "ultraep")
        self.comm, self.batch = comm, MANY

    def reasons(self):
        return []

    def group(self, device):
        return self.comm

    def homes_of(self, layer):
        return (0, 0, 0, 0, 1, 1, 1, 1)

    def tokens(self):
        return self.batch

    def most_tokens(self):
        return LIMIT

    @property
    def is_first(self):
        return self.comm.rank == 0


def decide(comm, sizes, **settings):
    """Run a batch of each size; return policies and whether there were replicas."""
    service = ServiceOfRank(comm, **settings)
    weights = SimpleNamespace(w2_weight=torch.zeros(1))
    layer = EXAMPLE.layer(service._balancer(weights, service.homes_of(None)))
    layer.top_k, layer.least_tokens = 2, None
    service.layers = [layer]
    decided = []
    for service.batch in sizes:
        layer(EXAMPLE.inputs[comm.rank], policy=service.policy(layer))
        plan = layer.last_plan
        decided.append((plan.config.policy, plan.num_replicas > 0))
    return decided


def decisions(sizes, **settings):
    """Return the decisions of both ranks."""
    return LocalGroup(2).run(lambda comm: decide(comm, sizes, **settings))


@pytest.fixture
def measured(monkeypatch):
    """Replace the measurement by these rates."""
    monkeypatch.delenv("ULTRAEP_RATES")

    def of(*steps):
        monkeypatch.setattr(cost, "measure", lambda *_: MeasuredRates(steps))

    return of


def test_large_batches_are_balanced_if_replicas_pay(measured, caplog):
    measured((1, Rates(row=1_000_000, copy=100_000)))
    with caplog.at_level(logging.INFO, "ultraep"):
        actual = decisions([MANY, 0, MANY])
    assert actual == [[("ultraep", True), ("none", False), ("ultraep", True)]] * 2
    assert caplog.text.count("batches under 8 tokens are not balanced") == 1


def test_batches_in_which_replicas_cannot_pay_are_not_planned(measured, caplog):
    """A replica must save 100 rows, or 3,000 in small batches, where rows are cheap."""
    measured((1, Rates(row=1_000, copy=3_000_000)), (16, Rates(row=30_000, copy=3_000_000)))
    with caplog.at_level(logging.INFO, "ultraep"):
        actual = decisions([FEW, FEW, 799, 800])
    first, small, large = ("ultraep", False), ("none", False), ("ultraep", False)
    assert actual == [[first, small, small, large]] * 2  # 60 tokens have no 100 rows to save
    assert caplog.text.count("a replica pays from 100 rows on") == 1
    assert "no batch has more" not in caplog.text


def test_a_machine_on_which_replicas_never_pay(measured, caplog):
    measured((1, Rates(row=1_000, copy=10**9)))
    with caplog.at_level(logging.INFO, "ultraep"):
        actual = decisions([MANY, MANY, MANY])
    assert actual == [[("ultraep", False), ("none", False), ("none", False)]] * 2
    assert "under 8,000,000 tokens are not balanced; no batch has more than 1,000" in caplog.text


@pytest.mark.parametrize("rates", ["row=1000,copy=1000000000", "off"])
def test_min_rows_replaces_the_measurement(monkeypatch, rates):
    monkeypatch.setenv("ULTRAEP_RATES", rates)
    expected = [("none", False), ("ultraep", True)]
    assert decisions([4, 5], min_rows=5) == [expected] * 2


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ("row=1000,copy=1000000000", [("none", False)] * 2),
        ("row=1000", [("ultraep", True)] * 2),
        ("off", [("ultraep", True)] * 2),
    ],
)
def test_rates_of_the_environment(monkeypatch, rates, expected):
    monkeypatch.setenv("ULTRAEP_RATES", rates)
    assert decisions([FEW, MANY]) == [expected] * 2


def test_other_policies_balance_all_batches(measured):
    measured((1, Rates(row=1_000, copy=10**9)))
    expected = [("none", False)] * 2
    assert decisions([FEW, MANY], policy="none") == [expected] * 2


def test_the_log_line_of_an_engine_without_a_limit():
    assert "no batch has more" not in which_batches(100, 100, None)
    assert "no batch has more" not in which_batches(100, 100, 100)
