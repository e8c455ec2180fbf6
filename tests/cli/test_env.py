"""`ultraep env`: the facts of a bug report."""

import json
import platform
import subprocess
import sys

import numpy as np
import pytest

import ultraep
from ultraep.backends import BackendInfo
from ultraep.tools.cli import env
from ultraep.tools.sim.planning import OWN

from .commands import flat, records


def test_json_holds_all_facts():
    facts = records("env")
    assert facts["ultraep"] == ultraep.__version__
    assert facts["python"].endswith(platform.python_version())
    assert facts["packages"]["numpy"] == np.__version__
    assert facts["backends"] == {"triton": True, "cpu": True, "reference": True}
    assert facts["chosen"] == {"cpu": "cpu", "cuda": "triton"}
    assert set(OWN) <= set(facts["policies"])
    assert facts["cpus"] >= 1
    assert set(facts["torch"]) == {"cuda", "rocm", "available", "devices"}


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(env, "PACKAGES", ("numpy", "no-such-package"))
    missing = BackendInfo("gpu", "cuda", "no_such_module")
    monkeypatch.setattr(env, "BACKENDS", (missing, BackendInfo("reference", "cpu")))
    assert records("env")["chosen"] == {"cpu": "reference", "cuda": "reference"}
    shown = flat("env")
    assert "no-such-package not installed" in shown
    assert "chosen for CPU and GPU tensors" in shown
    assert "not available: needs no_such_module" in shown


@pytest.mark.slow
def test_torchrun_shows_a_map_of_ranks(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*launcher, "--standalone", "-m", "ultraep", "env", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    ranks = json.loads(ran.stdout)["ranks"]  # only rank 0 prints
    assert [(rank["rank"], rank["domain"]) for rank in ranks["map"]] == [(0, 0), (1, 0)]
    assert ranks["domains"] == f"one domain: all ranks are on {platform.node()}"
    assert ranks["not_joined"] == []
