"""Every backend returns the plans of the reference, on named and random cases."""

import numpy as np
import pytest
from cases import NAMED, assert_same_plan, configs, problems, timed_configs, with_speeds
from hypothesis import given
from hypothesis import strategies as st

import ultraep
from ultraep import BackendUnavailable, BalanceConfig, ConfigError, backends
from ultraep.backends.limits import Limits

FAST = ["cpu"]  # `test_triton.py` tests the GPU kernels, which are slow here
SETTINGS = [
    BalanceConfig(),
    BalanceConfig(tolerance=0.01),
    BalanceConfig(tolerance=0.3, locality=False),
    BalanceConfig(min_tokens_per_replica=20),
    BalanceConfig(max_replicas=2, tolerance=0.05),
]


def assert_agrees(backend, loads, topology, config):
    wanted = ultraep.plan(loads, topology, config, backend="reference")
    assert_same_plan(ultraep.plan(loads, topology, config, backend=backend), wanted)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("config", SETTINGS, ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_named_cases(name, config, backend):
    assert_agrees(backend, *NAMED[name], config)


@pytest.mark.parametrize("backend", FAST)
@given(problems(), configs)
def test_random_cases(backend, problem, config):
    assert_agrees(backend, *problem, config)


@pytest.mark.parametrize("backend", FAST)
@given(problems(), timed_configs)
def test_quickest_plans(backend, problem, config):
    assert_agrees(backend, *problem, config)


@pytest.mark.parametrize("backend", FAST)
@given(problems(), st.one_of(configs, timed_configs), st.data())
def test_speeds(backend, problem, config, data):
    loads, topology = problem
    assert_agrees(backend, loads, topology, with_speeds(data.draw, config, topology.ranks))


@pytest.mark.parametrize("backend", FAST)
@given(problems(), configs, st.data())
def test_bounds(backend, problem, config, data):
    loads, topology = problem
    if data.draw(st.booleans()):
        config = with_speeds(data.draw, config, topology.ranks)
    bounds = {
        backends.select(name).lower_bound(loads.sum(axis=0), Limits.of(topology, config))
        for name in ("reference", backend)
    }
    assert len(bounds) == 1


@pytest.mark.parametrize("backend", FAST)
@given(st.lists(st.integers(-2, 12), max_size=50), st.integers(1, 12))
def test_counts(backend, ids, experts):
    ids = np.array(ids, dtype=np.int64)
    (wanted, bad), (counts, unknown) = (
        backends.select(name).count(ids, experts) for name in ("reference", backend)
    )
    np.testing.assert_array_equal(counts, wanted)
    assert unknown == bad


def test_an_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match="unknown backend 'gpu'; choose from cpu, reference"):
        backends.select("gpu")


@pytest.fixture
def without_numba(monkeypatch):
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    for function in (backends._named, backends._best):
        function.cache_clear()
    yield
    for function in (backends._named, backends._best):
        function.cache_clear()


def test_an_explicit_choice_never_falls_back(without_numba):
    with pytest.raises(BackendUnavailable, match=r"'cpu' needs numba.*pip install numba"):
        backends.select("cpu")


def test_an_automatic_choice_says_what_it_leaves_out(without_numba, caplog):
    assert backends.select().__name__ == "ultraep.backends.reference"
    assert "backend 'cpu' needs numba" in caplog.text
