"""Settings, texts and arrays with wrong values are accepted, or refused in one line."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from damage import CONFUSED, damaged

import ultraep
from ultraep import (
    BalanceConfig,
    BalancedMoE,
    Balancer,
    ConfigError,
    LoadError,
    LocalGroup,
    PlanError,
    Rates,
    Topology,
    UltraEPError,
    workload,
)
from ultraep.config import RATES_VARIABLE, from_environment
from ultraep.integrations.serving.settings import read_settings
from ultraep.plan import plan_from_replicas
from ultraep.routes import batch_routes, from_vllm, packed_routes
from ultraep.runtime.settings import Settings
from ultraep_tools.cli.options import split_names, split_numbers
from ultraep_tools.launch.processes import RankPlace

ROUNDS = 60
DIGITS = "7" * 9999  # int() refuses so many
NEAR = (-1, 0, 1, 2, 3, 7, 1 << 16, 0.25, "auto", "none", "static", [0, 1], [5, 900], "9" * 30)


def alone(**options):
    comm = LocalGroup(1).run(lambda comm: comm)[0]
    return Balancer._with_settings(comm, **options)


SETTINGS = {
    "topology": (Topology, {"ranks": 4, "experts": 8, "slots": 1, "domain": 2}),
    "homes": (Topology, {"ranks": 2, "experts": 3, "slots": 1, "homes": [0, 0, 1]}),
    "config": (
        BalanceConfig,
        {
            "policy": "ultraep",
            "tolerance": 0.01,
            "min_tokens_per_replica": 2,
            "max_replicas": 3,
            "locality": True,
            "objective": "time",
            "speeds": [900, 1000],
        },
    ),
    "rates": (Rates, {"row": 5, "copy": 4, "each": 3, "layer": 2}),
    "balancer": (
        lambda **options: alone(**options).close(),
        {"experts": [0, 0, 0, 0], "slots": 1, "policy": "ultraep", "timeout": 5.0, "domain": 1},
    ),
    "settings": (Settings, {"backend": "cpu", "in_flight": 1, "capacity": 8, "timeout": 1.5}),
    "vllm": (
        lambda **given: read_settings({}, {"ultraep": given}),
        {"slots": 2, "policy": "ultraep", "tolerance": 0.1, "min_rows": 4},
    ),
    "loads": (
        lambda loads, history: ultraep.plan(loads, Topology(ranks=2, experts=4), history=history),
        {"loads": [[3, 1, 0, 9], [2, 0, 5, 40]], "history": [[1, 2, 3, 4]]},
    ),
    "ids": (ultraep.count_loads, {"ids": [[0, 1], [3, -1]], "experts": 4}),
}


def assert_refused_in_one_line(call, given):
    words = "one line"
    try:
        call()
    except UltraEPError as error:
        words = str(error)
    except Exception as error:  # noqa: BLE001  any other exception is a failure
        pytest.fail(f"{given!r}: {error!r}")
    assert len(words.splitlines()) == 1, (given, words)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_any_type(name):
    build, valid = SETTINGS[name]
    build(**valid)
    rng = random.Random(name)
    for _ in range(ROUNDS):
        wrong = rng.sample(sorted(valid), min(len(valid), rng.choice((1, 1, 2, 3))))
        options = valid | {key: rng.choice((*CONFUSED, *NEAR)) for key in wrong}
        assert_refused_in_one_line(lambda options=options: build(**options), options)


TEXTS = {
    "rates": (Rates.from_text, "row=5300,copy=41000000"),
    "names": (lambda text: split_names(text, "--policy"), "none, eplb"),
    "numbers": (lambda text: split_numbers(text, "--layers"), "7,0-2"),
}


@pytest.mark.parametrize("name", [*TEXTS, "rates of the environment"])
def test_texts_that_are_damaged(name, monkeypatch):
    read, valid = TEXTS.get(name, (lambda _: from_environment(BalanceConfig()), "row=5300"))
    rng = random.Random(name)
    for number in range(ROUNDS):
        text = damaged(valid.encode(), rng).decode("utf-8", "replace") if number else valid
        text += DIGITS if rng.random() < 0.1 else ""
        monkeypatch.setenv(RATES_VARIABLE, text.replace("\x00", ""))
        assert_refused_in_one_line(partial(read, text), text)


ROUTES = [torch.zeros(2, 1, 2), torch.zeros(1, 1, 2)]
QUOTAS = np.array([[0, 1, 2**62], [0, 2, 2**62]])  # their sum overflows
FOUR = Topology(ranks=4, experts=4)
REFUSED = [
    *(
        (partial(ultraep.count_loads, [[0, 1]], experts), ConfigError, "experts must be")
        for experts in (-1, 0, True, 2.5, 2**40, [], {})
    ),
    *(
        (partial(LocalGroup, 2, timeout=seconds), ConfigError, "timeout must be a positive number")
        for seconds in (float("nan"), float("inf"), 0, -1, 10**20, "60", [1])
    ),
    *((partial(Settings, backend=b), ConfigError, "unknown backend") for b in ([], {}, 3)),
    *(
        (partial(workload.Load("even").draw, top_k=1, **sizes), ConfigError, "loads have at most")
        for sizes in (
            {"ranks": 10**20, "experts": 8},
            {"ranks": 4, "experts": 2**31},
            {"ranks": 4, "experts": 8, "tokens": 2**31},
        )
    ),
    *(
        (partial(packed_routes, ROUTES, lengths), LoadError, "has .* tokens, but the routes of")
        for lengths in ([2, -(2**63)], [-1, 2], [2**40, 1], [2, 3])
    ),
    (partial(packed_routes, [torch.tensor(3)], [1]), LoadError, r"must be \[tokens, layers, K\]"),
    (partial(batch_routes, ROUTES, torch.tensor(1)), LoadError, "mask"),
    *(
        (partial(from_vllm, np.zeros((1, 2, 2), "i2"), layers), LoadError, "of the routed layers")
        for layers in ([], [-1])
    ),
    (
        partial(plan_from_replicas, np.full((4, 4), 5), FOUR, BalanceConfig(), QUOTAS),
        PlanError,
        "serves more rows than its expert has",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_values_that_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_launchers_with_too_many_digits(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", DIGITS)
    with pytest.raises(ConfigError, match="the launcher started"):
        Balancer(experts=4)
    monkeypatch.setenv("RANK", DIGITS)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="which is no rank"):
        RankPlace.of_torchrun()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("router.weight"), "Missing key"),
        (lambda state: state.update({"experts.down_proj": torch.tensor(1.0)}), "has the shape"),
        (lambda state: state.update({"router.weight": torch.zeros(4, 9)}), "size mismatch"),
    ],
)
def test_states_of_another_layer(change, message):
    balancer = alone(experts=4, slots=0, policy="none")
    layer = BalancedMoE.swiglu(8, 4, 4, 2, balancer=balancer)
    state = layer.full_state_dict()
    change(state)
    with pytest.raises(ConfigError, match=message) as caught:
        layer.load_full_state_dict(state)
    assert len(str(caught.value).splitlines()) == 1
