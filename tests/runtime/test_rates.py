"""Rates: measured once, equal on all ranks, and used for plans."""

import json
import logging

import pytest
import torch
from dense import Example, assert_close, network
from microbatches import planned
from ranks import TRANSPORTS, everywhere, shared_pool
from shared_peers import SharedPeers
from torch.utils.checkpoint import checkpoint

from ultraep import BalanceConfig, Balancer, ConfigError, ExpertsFrom, LocalGroup, Rates, read_trace
from ultraep.backends.triton.device import interpreted
from ultraep.bundle import Layout
from ultraep.config import MOST_PER_ROW, from_environment, two_digits
from ultraep.runtime import cost
from ultraep.runtime.cost import (
    LayerShape,
    MeasuredRates,
    Timings,
    rates_from,
    slopes,
)
from ultraep_tools.replay import differing

VARIABLE = "ULTRAEP_RATES"
EXPENSIVE = Rates(row=1000, copy=10**9)
CHEAP = Rates(row=1000)
WEIGHT = ("w", (4, 8), torch.float32)  # 128 bytes


def layer_shape(*, trained=False, resends=False):
    return LayerShape(Layout((WEIGHT,)), 128 * trained, 32, resends)


@pytest.fixture
def measuring(monkeypatch):
    monkeypatch.delenv(VARIABLE)


@pytest.fixture
def measured(measuring, monkeypatch):
    """Replace the measurement by fixed rates; return the ranks that measured."""
    measuring_ranks = []

    def of(rates, forward=None):
        def measure(*given):
            measuring_ranks.append(given[-1].rank)  # the communicator
            return MeasuredRates(((1, rates),), forward=((1, forward or rates),))

        monkeypatch.setattr(cost, "measure", measure)
        return measuring_ranks

    return of


# Timings of all ranks -> rates.


def test_the_quickest_turn_of_the_slowest_rank_counts():
    one, small = [3e-6] * 2, [4e-6] * 2
    actual = [
        Timings(1, [5e-6, 60e-6], idle=[1e-6, 5e-6], one=one, small=small, whole=[9e-6, 24e-6]),
        Timings(1, [9e-6, 50e-6], idle=[2e-6, 1e-6], one=one, small=small, whole=[14e-6, 7e-6]),
    ]
    transfer = 10e-6 / 128 * 2 * 32  # 10 us for 128 bytes; a row of 32 bytes comes and goes
    expected = Rates.from_seconds(row=3e-6 + transfer, copy=12e-6, each=1e-6, layer=0.0)
    assert rates_from(actual, 2, layer_shape()) == MeasuredRates(((1, expected),), (5e-6, 50e-6))
    assert rates_from(actual[::-1], 2, layer_shape()) == rates_from(actual, 2, layer_shape())


def test_ranks_without_home_experts_do_not_measure_rows():
    one = Timings(2, [2e-6, 3e-6, 5e-6], *([1e-6],) * 4)
    none = one._replace(homes=0, network=[])
    assert rates_from([none, one, none], 2, layer_shape()) == rates_from([one], 2, layer_shape())


def test_rates_depend_on_the_rows_per_expert():
    """Here, 16 rows take no longer than one, because reading the weights takes that long."""
    far, less = [4.0, 4.0, 8.0, 32.0], [4.0, 4.0, 8.0]
    assert slopes(far, 2) == [(0.0, 2.0), (4 / 96, 4 / 2 - 16 * 4 / 96), (24 / 384, 0.0)]
    actual = rates_from([Timings(2, one, *([0.0],) * 4) for one in (far, less)], 2, layer_shape())
    assert [least for least, _ in actual.steps] == [1, 16]
    few, many = (rates for _, rates in actual.steps)
    assert few.row == 1  # nothing is saved
    assert (actual.at(0), actual.at(15), actual.at(16), actual.at(900)) == (few, few, many, many)
    assert str(actual) == f"from 1 rows {few}; from 16 rows {many}"


# From the environment.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("off", BalanceConfig(objective="balance")),
        (" OFF ", BalanceConfig(objective="balance")),
        ("row=5300, copy=41000000", BalanceConfig(rates=Rates(row=5300, copy=41_000_000))),
        (" ", BalanceConfig()),
    ],
)
def test_environment(monkeypatch, text, expected):
    monkeypatch.setenv(VARIABLE, text)
    assert from_environment(BalanceConfig()) == expected
    for config in (BalanceConfig(objective="balance"), BalanceConfig(rates=EXPENSIVE)):
        assert from_environment(config) is config


SPELLING = r"rates (must be|need) row=PICOSECONDS"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *((text, SPELLING) for text in ("on", "row=1.5", "row=1e5", "row=nan", "row=-1", "rows=1")),
        *((text, SPELLING) for text in ("copy=1", "row=1 row=2", "row=5,copy=", "row=5;copy=3")),
        ("row=\u0663", SPELLING),
        (f"row={'9' * 5000}", SPELLING),
        ("row=0", "row must be an integer of at least 1, got 0"),
        (f"row={'9' * 20}", f"row must be at most {MOST_PER_ROW}"),
    ],
    ids=lambda value: value[:16],
)
def test_invalid_rates_in_the_environment(monkeypatch, text, reason):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError, match=f"variable {VARIABLE} must be 'off' or rates: {reason}"):
        Balancer("alone", experts=2)


# In a layer.

EXAMPLE = Example([30] * 4)


def steps(comm, count=2, layers=1, record=None, **options):
    balancer = Balancer._with_settings(comm, experts=8, record=record, **options)
    made = [EXAMPLE.layer(balancer) for _ in range(layers)]
    outputs = []
    for _ in range(count):
        for layer in made:
            x = EXAMPLE.inputs[comm.rank].clone().requires_grad_()
            layer(x).backward(EXAMPLE.gradients[comm.rank])
            outputs.append(x.grad)
    balancer.close()
    return outputs, [layer.last_plan for layer in made], balancer.stats(), repr(balancer)


def test_replicas_that_do_not_pay_are_not_made(measured):
    measuring_ranks = measured(EXPENSIVE)
    actual = LocalGroup(4).run(steps)
    assert sorted(measuring_ranks) == [0, 1, 2, 3]
    for _, (plan,), stats, text in actual:
        assert plan.num_replicas == 0
        assert plan.left_alone
        assert plan.time == plan.time_without_replicas == 1000 * plan.rank_loads.max()
        assert (stats["priced"], stats["left_alone"], stats["copies"]) == (2, 2, 0)
        assert stats["planned_seconds"] == pytest.approx(2e-12 * plan.time)
        assert stats["rates"] == {0: {1: {"row": 0.001, "copy": 1000, "each": 0, "layer": 0}}}
        assert json.loads(json.dumps(stats))["left_alone"] == 2
        assert str(EXPENSIVE) in text


def test_replicas_that_pay_are_made(measured, monkeypatch):
    measured(CHEAP)
    actual = LocalGroup(4).run(steps)
    monkeypatch.setenv(VARIABLE, "off")
    for own, expected in zip(actual, LocalGroup(4).run(steps), strict=True):
        assert own[1] == expected[1]
        assert own[2]["copies"] == expected[2]["copies"] > 0
        assert own[2]["left_alone"] == 0
        assert own[1][0].time < own[1][0].time_without_replicas
        assert "ms by its rates" in repr(own[1][0])
        for one, other in zip(own[0], expected[0], strict=True):
            assert_close(one, other, "gradient", 1e-12)


def test_inference_is_priced_without_backward(measured):
    measured(EXPENSIVE, CHEAP)

    def work(comm):
        layer = EXAMPLE.layer(Balancer(comm, experts=8))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                layer(EXAMPLE.inputs[comm.rank])
            yield layer.last_plan.num_replicas

    for in_training, in_inference in LocalGroup(4).run(lambda comm: list(work(comm))):
        assert in_training == 0 < in_inference


def test_layers_of_one_shape_share_their_rates(measured):
    measuring_ranks = measured(EXPENSIVE)
    actual = LocalGroup(4).run(lambda comm: steps(comm, layers=3))
    assert sorted(measuring_ranks) == [0, 1, 2, 3]
    assert actual[0][2]["rates"] == {layer: {1: EXPENSIVE.microseconds} for layer in range(3)}


@pytest.mark.parametrize(
    "options",
    [
        {"config": BalanceConfig(objective="balance")},
        {"config": BalanceConfig(rates=CHEAP)},
        {"policy": "none"},
        {"slots": 0},
    ],
    ids=["balance", "given", "none", "no slots"],
)
@pytest.mark.filterwarnings("ignore::ultraep.NothingToBalance")
def test_rates_that_plans_do_not_need_are_not_measured(measured, options):
    measuring_ranks = measured(EXPENSIVE)
    LocalGroup(4).run(lambda comm: steps(comm, **options))
    assert measuring_ranks == []


def test_a_group_of_one_measures_nothing(measured, caplog):
    measuring_ranks = measured(EXPENSIVE)
    with caplog.at_level(logging.INFO, logger="ultraep"):
        balancer = Balancer("alone", experts=8)
        EXAMPLE.layer(balancer)(EXAMPLE.inputs[0])
    assert measuring_ranks == []
    assert "rates" not in caplog.text


def test_unknown_rates_are_logged_once(measuring, caplog):
    def by_hand(comm):
        balancer = Balancer(comm, experts=8)
        for _ in range(2):
            plan = planned(balancer, torch.tensor([[0]]))[1]
        return plan.num_replicas

    with caplog.at_level(logging.INFO, logger="ultraep"):
        assert LocalGroup(2).run(by_hand) == [1, 1]
    assert caplog.text.count("planned for balance, not for time") == 2


def test_a_recomputed_forward_pass_has_the_same_plan(measured):
    """A reentrant checkpoint runs first without gradients; backward measures nothing."""
    measuring_ranks = measured(EXPENSIVE)

    def work(comm):
        balancer = Balancer(comm, experts=8)
        layer = EXAMPLE.layer(balancer)
        plans = []
        x = EXAMPLE.inputs[comm.rank].clone().requires_grad_()

        def block(x):
            y = layer(x)
            plans.append(layer.last_plan)
            return y

        checkpoint(block, x, use_reentrant=True).backward(EXAMPLE.gradients[comm.rank])
        return plans

    for first, again in LocalGroup(4).run(work):
        assert first == again
        assert first.rates == again.rates == EXPENSIVE
    assert sorted(measuring_ranks) == [0, 1, 2, 3]


def test_a_trace_replays_bit_for_bit(measured, tmp_path, monkeypatch):
    measured(Rates(row=1000, copy=5000))
    LocalGroup(4).run(lambda comm: steps(comm, record=tmp_path / "run"))
    monkeypatch.setenv(VARIABLE, "off")
    trace = read_trace(tmp_path / "run")
    assert trace.header.objective == "time"
    assert trace.rates.tolist() == [[1000, 5000, 0, 0]] * 2
    assert differing(trace) == []
    assert trace.plan(0).time is not None
    trace.save(tmp_path / "one.npz")
    assert read_trace(tmp_path / "one.npz").rates_of(1) == Rates(row=1000, copy=5000)


# Real measurements.


def measured_here(comm, own_network):
    with pytest.MonkeyPatch.context() as patch:  # processes have their own environment
        patch.delenv(VARIABLE, raising=False)
        balancer = Balancer(comm, experts=8)
    layer = EXAMPLE.layer(balancer)
    if own_network:
        home = list(layer.experts.home_experts)
        layer.experts = ExpertsFrom(network, dict(layer.experts.bundle), home)
    before = torch.random.get_rng_state()
    x = EXAMPLE.inputs[comm.rank].clone().requires_grad_()
    layer(x).backward(EXAMPLE.gradients[comm.rank])
    stats = balancer.stats()
    assert torch.equal(before, torch.random.get_rng_state())
    assert stats["microbatches"] == 1
    assert stats["weights_copies_sent"] <= 8
    return stats["rates"][0]


@pytest.mark.parametrize("own_network", [False, True], ids=["experts", "network"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_ranks_have_the_same_rates(transport, own_network, one_thread, monkeypatch):
    if transport == "local":  # processes that start now keep the environment of this one
        monkeypatch.delenv(VARIABLE)
    actual = everywhere(transport, 4, measured_here, own_network)
    assert actual == actual[:1] * 4
    assert 1 in actual[0]
    for rates in actual[0].values():
        assert all(two_digits(round(1e6 * us)) == round(1e6 * us) for us in rates.values())


def mapped_here(rank, group):
    example = Example([6] * 2, experts=4, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VARIABLE, raising=False)
        balancer = Balancer._with_settings(
            group, peers=SharedPeers(group), experts=4, data_plane="mapped"
        )
    layer = example.layer(balancer)
    outputs = [layer(example.inputs[rank]).detach() for _ in range(2)]
    balancer.check()
    return outputs, balancer.stats()["rates"][0], balancer.stats()["microbatches"]


@pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
def test_all_mapped_ranks_have_the_same_rates():
    actual = shared_pool().run(2, mapped_here)
    assert actual[0][1] == actual[1][1]
    for (first, second), _, microbatches in actual:
        assert torch.equal(first, second)
        assert microbatches == 2
