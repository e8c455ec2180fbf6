"""`ultraep env`: the facts of a bug report."""

import json
import platform
import sys

import numpy as np
import pytest

import ultraep
from ultraep.backends import BackendInfo
from ultraep.policies import BUILT_IN
from ultraep.tools.cli import env

from .commands import output


def test_json_holds_all_facts():
    facts = json.loads(output("env", "--json"))
    assert facts["ultraep"] == ultraep.__version__
    assert facts["python"].endswith(platform.python_version())
    assert facts["packages"]["numpy"] == np.__version__
    assert facts["backends"] == {"triton": True, "cpu": True, "reference": True}
    assert facts["chosen"] == {"cpu": "cpu", "cuda": "triton"}
    assert set(BUILT_IN) <= set(facts["policies"])
    assert facts["cpus"] >= 1
    assert set(facts["torch"]) == {"cuda", "rocm", "available", "devices"}


def test_the_table_has_the_same_facts():
    shown = output("env")
    for word in (ultraep.__version__, np.__version__, platform.platform(), "eplb", "numba"):
        assert word in shown
    assert "chosen for CPU tensors" in shown
    assert "chosen for GPU tensors" in shown


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(env, "PACKAGES", ("numpy", "no-such-package"))
    monkeypatch.setattr(
        env,
        "BACKENDS",
        (
            BackendInfo("gpu", "cuda", "no_such_module"),
            BackendInfo("reference", "cpu"),
        ),
    )
    lines = {line.split()[0]: line for line in output("env").splitlines() if line.strip()}
    assert "not installed" in lines["no-such-package"]
    chosen = json.loads(output("env", "--json"))["chosen"]
    assert chosen == {"cpu": "reference", "cuda": "reference"}
    assert "chosen for CPU and GPU tensors" in output("env")
    assert "not available: needs no_such_module" in output("env")


def test_a_torch_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "error" in json.loads(output("env", "--json"))["torch"]
    assert "torch cannot be imported" in output("env")


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        ({"cuda": None, "rocm": None, "devices": []}, "CPU only"),
        ({"cuda": "12.8", "rocm": None, "devices": []}, "CUDA 12.8: no device found"),
        ({"cuda": "12.8", "rocm": None, "devices": ["H200", "H200"]}, "CUDA 12.8: H200, H200"),
        ({"cuda": None, "rocm": "6.2", "devices": ["MI300X"]}, "ROCm 6.2: MI300X"),
    ],
)
def test_devices_are_named(torch, expected):
    assert expected in env._devices(torch)
