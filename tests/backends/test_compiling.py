"""First use: the reference backend plans until one process per host has compiled the planner."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest
import torch
from cli.commands import shell, start
from demo.runs import alive

import ultraep
from ultraep import BalanceConfig, Rates, Topology, backends
from ultraep.backends import compiling, cpu
from ultraep.backends.compiling import CompiledPlanner
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
    compiling.PLANNER.wait()  # lower bounds use the automatic choice
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
    """A cache directory without the planner, and a compiler that runs until its stdin closes."""
    host = SimpleNamespace(compiled=False, planners=[])
    complete = SimpleNamespace(exists=lambda: host.compiled, touch=lambda: None)
    stub = SimpleNamespace(load=lambda: None, complete=complete, cache_folder=tmp_path)

    def planner():
        host.planners.append(CompiledPlanner())
        return host.planners[-1]

    host.planner = planner
    monkeypatch.setattr(compiling, "import_cpu", lambda: stub)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(compiling, "CHILD", "import os; os.read(0, 1)")
    monkeypatch.setattr(compiling, "POLL_INTERVAL", 0.0)
    yield host
    for planner in host.planners:
        if planner._child is not None:
            planner._child.stdin.close()
            planner._child.wait(LIMIT)


def test_the_first_rank_of_a_host_compiles(host, caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="ultraep.compile")
    first, second = host.planner(), host.planner()
    for rank, planner in enumerate((first, second, first, second)):
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
        assert not planner.ready()
    assert first._child is not None
    assert second._child is None
    (message,) = caplog.messages
    assert "compiling the planner in the background" in message

    host.compiled = True
    first._child.communicate(timeout=LIMIT)  # closes its stdin: the compiler ends
    assert first.ready()
    assert second.ready()


def test_waiting_compiles_in_the_foreground(host):
    planner = host.planner()
    planner.wait()
    assert planner.ready()
    assert planner._child is None


@pytest.mark.parametrize("failure", ["exit code 3", "No such file or directory"])
def test_the_reference_plans_where_no_child_can_compile(host, monkeypatch, caplog, failure):
    if failure == "exit code 3":
        monkeypatch.setattr(compiling, "CHILD", "import sys; sys.exit(3)")
    else:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
    planner = host.planner()
    assert not planner.ready()
    if planner._child is not None:
        planner._child.communicate(timeout=LIMIT)
    assert not planner.ready()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert failure in record.getMessage()


def test_a_forked_process_leaves_the_compiler_to_its_parent(host):
    planner = host.planner()
    planner.ready()
    child, other_end = planner._child, os.dup(planner._child.stdin.fileno())
    planner.after_fork()
    assert not planner.ready()
    assert child.poll() is None
    os.close(other_end)
    child.wait(LIMIT)


def test_without_locks_every_process_compiles(host, tmp_path):
    (tmp_path / compiling.LOCK).mkdir()  # cannot be opened for writing, even by root
    host.planner().wait()


class NoCacheDirectory:
    """Fails to import the compiled functions, as numba does if it cannot write to its cache."""

    def find_spec(self, name, *_):
        if name == "ultraep.backends.cpu":
            raise RuntimeError("cannot cache function 'count': no locator available")


def test_without_a_cache_directory_the_reference_plans(monkeypatch, caplog):
    monkeypatch.delattr(backends, "cpu")
    monkeypatch.delitem(sys.modules, "ultraep.backends.cpu")
    monkeypatch.setattr(sys, "meta_path", [NoCacheDirectory(), *sys.meta_path])
    planner = CompiledPlanner()
    assert not planner.ready()
    assert not planner.ready()
    (message,) = caplog.messages
    assert "no locator available; set NUMBA_CACHE_DIR" in message
    with pytest.raises(BackendUnavailable, match="NUMBA_CACHE_DIR"):
        planner.wait()


# -- a fresh machine -----------------------------------------------------------------------------


@pytest.fixture
def fresh(tmp_path):
    """The environment of a machine where nothing is compiled."""
    return {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}


def test_the_first_plan_does_not_wait_for_a_compiler(fresh, tmp_path):
    loads = ultraep.workload.zipf(8, 64, ratio=2.0, top_k=2, seed=0)
    np.save(tmp_path / "loads.npy", loads)
    code, out, errors = shell("plan", tmp_path / "loads.npy", "--json", **fresh)
    assert code == 0, errors
    planned = ultraep.plan(loads, Topology(ranks=8, experts=64), backend="cpu")
    assert json.loads(out)[0]["digest"] == planned.digest()
    assert errors.count("\n") == 1
    assert "compiling the planner in the background" in errors


PARENT = """
import sys
from ultraep.backends import select
from ultraep.backends.compiling import PLANNER
print(select().__name__, PLANNER._child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for a process in /proc")
@pytest.mark.parametrize("end", ["killed", "done"])
def test_the_compiler_ends_with_its_parent(fresh, end):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with start(program=("-c", PARENT), environment=fresh, **pipes) as parent:
        name, child = parent.stdout.readline().split()
        assert name == "ultraep.backends.reference"
        assert alive([child])
        if end == "killed":
            parent.kill()
        parent.communicate(timeout=LIMIT)
    until = time.monotonic() + LIMIT
    while alive([child]) and time.monotonic() < until:
        time.sleep(0.01)
    assert not alive([child])


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
