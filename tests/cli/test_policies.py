"""Policies of users: registered in a file, or installed as an entry point."""

import json
import os

import numpy as np
import pytest
from traces import plan_for, record

from ultraep import workload

from .commands import SOURCE, shell

POLICY = """
import numpy as np
import ultraep


@ultraep.register_policy("{name}")
def decide(problem):
    return np.empty((0, 3), dtype=np.int64)
"""
ADVISE = "advise --cluster h200-nvl8 --model gpt-oss-20b --ep 8 --steps 1 --microbatches 1"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(POLICY.format(name="mine"))
    np.save(tmp_path / "loads.npy", workload.zipf(4, 8, ratio=1.5, top_k=2))
    record(tmp_path / "run", [plan_for(0)])
    return tmp_path


def run(line, folder, monkeypatch, *path):
    monkeypatch.chdir(folder)
    code, out, errors = shell(*line.split(), PYTHONPATH=os.pathsep.join(map(str, (SOURCE, *path))))
    assert code == 0, errors
    return out


@pytest.mark.parametrize("name", ["mine.py", "mine", "./mine.py"])
def test_a_policy_of_a_file_or_module_is_planned(folder, monkeypatch, name):
    out = run(f"--import {name} plan loads.npy --policy mine --json", folder, monkeypatch)
    (line,) = json.loads(out)
    assert (line["policy"], line["num_replicas"]) == ("mine", 0)


@pytest.mark.parametrize(
    "line", ["trace replay run --policy mine", "env", f"{ADVISE} --policy mine"]
)
def test_other_commands_know_the_policy(folder, monkeypatch, line):
    assert "mine" in run(f"--import mine.py {line}", folder, monkeypatch)


def test_a_policy_of_an_installed_package_needs_no_option(folder, monkeypatch):
    (folder / "site" / "theirs-1.0.dist-info").mkdir(parents=True)
    (folder / "site" / "their_policy.py").write_text(POLICY.format(name="theirs"))
    info = folder / "site" / "theirs-1.0.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ultraep.policies]\ntheirs = their_policy\n")
    site = folder / "site"
    assert "theirs" in run("env", folder, monkeypatch, site)
    out = run("plan loads.npy --policy theirs --json", folder, monkeypatch, site)
    assert json.loads(out)[0]["policy"] == "theirs"
