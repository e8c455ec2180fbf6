"""First use: one process per host compiles the planner, and others load it from disk."""

import fcntl
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest
import torch
from cli.commands import shell

import ultraep
from ultraep import BalanceConfig, Rates, Topology, backends
from ultraep.backends import cpu
from ultraep.errors import BackendUnavailable
from ultraep.policies import BUILT_IN
from ultraep.reroute import reroute

LIMIT = 60  # seconds, for a busy machine
FUNCTIONS = ("count", "lower_bound", "place", "reroute", "split", "tally")


# -- what is compiled ----------------------------------------------------------------------------


@pytest.fixture
def argument_types(monkeypatch):
    """Record the argument types of each compiled function, by name."""
    recorded = {}

    def record(module, name):
        function = getattr(module, name)

        def call(*args):
            recorded.setdefault(name, set()).add(tuple(map(numba.typeof, args)))
            return function(*args)

        monkeypatch.setattr(module, name, call)

    for name in FUNCTIONS:
        record(cpu, name)
    return recorded


def test_real_calls_have_the_types_that_were_compiled(argument_types):
    cpu.load()
    compiled = dict(argument_types)
    assert set(compiled) == set(FUNCTIONS)
    argument_types.clear()
    topology, ids = Topology(ranks=2, experts=4), torch.tensor([[0, 1], [0, 2], [0, 3]])
    loads = [ultraep.count_loads(ids, topology.experts, backend="cpu")] * 2
    for config in (
        BalanceConfig(),
        BalanceConfig(tolerance=0.1, max_replicas=1, locality=False),
        BalanceConfig(rates=Rates(row=5, copy=1)),
        *(BalanceConfig(policy=name) for name in BUILT_IN),
    ):
        plan = ultraep.plan(loads, topology, config, backend="cpu", history=loads)
        assert plan.lower_bound >= 1
    plan = ultraep.plan(np.stack(loads), topology, backend="cpu")
    assert plan.num_replicas
    reroute(ids, plan, 0, backend="cpu")
    assert argument_types == compiled


# -- who compiles --------------------------------------------------------------------------------


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A cache directory without the planner; `loads` lists whether it was complete at each load."""
    host = SimpleNamespace(folder=tmp_path, complete=tmp_path / "complete", loads=[])
    monkeypatch.setattr(cpu, "cache_folder", host.folder)
    monkeypatch.setattr(cpu, "complete", host.complete)
    monkeypatch.setattr(cpu, "load", lambda: host.loads.append(host.complete.exists()))
    return host


def test_only_the_first_process_says_that_it_compiles(host, caplog):
    cpu.load_or_compile()
    cpu.load_or_compile()
    assert host.loads == [False, True]
    (message,) = caplog.messages
    assert message == "ultraep: compiling the planner, once per machine: half a minute"


def test_a_process_waits_for_the_one_that_compiles(host, caplog):
    with (host.folder / cpu.LOCK).open("wb") as lock, ThreadPoolExecutor(1) as other:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = other.submit(cpu.load_or_compile)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.2)
        host.complete.touch()
        fcntl.flock(lock, fcntl.LOCK_UN)
        waiting.result(timeout=LIMIT)
    assert host.loads == [True]
    assert not caplog.messages


def test_without_locks_every_process_compiles(host):
    (host.folder / cpu.LOCK).mkdir()  # cannot be opened for writing, even by root
    cpu.load_or_compile()
    assert host.loads == [False]


class NoCacheDirectory:
    """Fails to import the compiled functions, as numba does if it cannot write to its cache."""

    def find_spec(self, name, *_):
        if name == "ultraep.backends.cpu":
            raise RuntimeError("cannot cache function 'count': no locator available")


def test_without_a_cache_directory_the_reference_plans(monkeypatch, caplog):
    for function in (backends._named, backends._best):
        monkeypatch.setattr(backends, function.__name__, function.__wrapped__)
    monkeypatch.delattr(backends, "cpu")
    monkeypatch.delitem(sys.modules, "ultraep.backends.cpu")
    monkeypatch.setattr(sys, "meta_path", [NoCacheDirectory(), *sys.meta_path])
    assert backends.select().__name__ == "ultraep.backends.reference"
    (message,) = caplog.messages
    assert "no locator available; set NUMBA_CACHE_DIR" in message
    with pytest.raises(BackendUnavailable, match="NUMBA_CACHE_DIR"):
        backends.select("cpu")


@pytest.mark.slow
def test_the_first_plan_on_a_new_machine(tmp_path):
    loads = ultraep.workload.zipf(8, 64, ratio=2.0, top_k=2, seed=0)
    np.save(tmp_path / "loads.npy", loads)
    planned = ultraep.plan(loads, Topology(ranks=8, experts=64), backend="reference")
    for lines in (1, 0):
        environment = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        code, out, errors = shell("plan", tmp_path / "loads.npy", "--json", **environment)
        assert code == 0, errors
        assert json.loads(out)[0]["digest"] == planned.digest()
        assert errors.count("ultraep: compiling the planner") == errors.count("\n") == lines


# -- sources that change ---------------------------------------------------------------------------


def test_functions_of_other_sources_are_discarded(tmp_path, monkeypatch):
    """Numba itself would keep a function while only its callees change."""
    sources, cache = tmp_path / "backends", tmp_path / "cache"
    (sources / "cpu").mkdir(parents=True)
    cache.mkdir()
    monkeypatch.setattr(cpu, "BACKENDS", sources)
    left = []
    for text in ("LIMIT = 1", "LIMIT = 1", "LIMIT = 2"):
        (sources / "cpu/place.py").write_text(text)
        cpu.discard_stale(cache)
        left.append(len(list(cache.glob("*.nbi"))))
        (cache / "place.nbi").touch()
    assert left == [0, 1, 0]


def test_all_functions_are_in_the_directory_that_is_checked():
    folders = {getattr(cpu, name).stats.cache_path for name in FUNCTIONS}
    assert len(folders) == 1
    assert (Path(folders.pop()) / cpu.STAMP).exists()
