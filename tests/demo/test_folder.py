"""The output directory of a demo, its sizes, and its text."""

import os
import sys

import numpy as np
import pytest
import torch
from cli.test_demo import RESULT
from traces import plan_for, record

from demo.runs import tiny_job
from ultraep.errors import FileError
from ultraep_tools.cli import demo
from ultraep_tools.demo import sizes as module
from ultraep_tools.demo import text as texts
from ultraep_tools.demo.result import trace_folder
from ultraep_tools.demo.sizes import choose
from ultraep_tools.demo.text import Text, library_text

MARKER = ".ultraep-demo"
POLICIES = ("none", "ultraep")
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def prepare(out, policies=POLICIES):
    demo.prepare(tiny_job(out, policies))


def test_the_next_demo_replaces_the_last(tmp_path):
    prepare(tmp_path)
    for policy in POLICIES:
        record(trace_folder(tmp_path, policy), [plan_for(0)])
    RESULT.save(tmp_path)
    (tmp_path / "report.html").write_text("report")
    (tmp_path / "mine.txt").write_text("kept")
    prepare(tmp_path, ["ultraep"])
    assert sorted(os.listdir(tmp_path)) == [MARKER, "mine.txt", "none", "ultraep"]
    assert not trace_folder(tmp_path, "ultraep").exists()
    assert trace_folder(tmp_path, "none").exists()
    prepare(tmp_path)
    assert not trace_folder(tmp_path, "none").exists()
    assert (tmp_path / "mine.txt").read_text() == "kept"


USER_FILES = {  # and the path in the error
    "ultraep/trace/record.py": "ultraep/trace",
    "result.json": "result.json",
    "none": "none",
}


@pytest.mark.parametrize("file", USER_FILES)
def test_a_file_of_the_user_is_refused_and_stays(tmp_path, file):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("mine")
    with pytest.raises(FileError, match=str(tmp_path / USER_FILES[file])) as caught:
        prepare(tmp_path)
    assert "\n" not in str(caught.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / file]
    assert (tmp_path / file).read_text() == "mine"


@pytest.mark.parametrize(
    ("cores", "ranks", "slots"), [(1, 2, 2), (3, 2, 2), (4, 4, 1), (7, 4, 1), (96, 4, 1)]
)
def test_ranks_are_a_power_of_two_by_cores(cores, ranks, slots):
    sizes, notes = choose(cores)
    assert (sizes.ranks, sizes.slots) == (ranks, slots)
    assert bool(notes) == (cores < ranks)


def test_containers_limit_the_cores(monkeypatch):
    for quota, limit in (("150000 100000\n", 1), ("max 100000\n", None), ("", None)):
        monkeypatch.setattr(module, "_quota", lambda quota=quota: quota)
        assert module._core_limit() == limit


def test_held_out_text_is_never_trained_on():
    data = library_text()["prose"]
    text = Text({"prose": data})
    parts = [text.training["prose"], text.held_out["prose"]]
    assert bytes(torch.cat(parts).tolist()) == data
    rng, length = np.random.default_rng(0), len(parts[1])
    held_out = text.sequences(rng, ["prose"], length, held_out=True)
    assert torch.equal(held_out[0], parts[1].long())


def test_a_missing_library_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(texts.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(FileError, match="no text in Python's library"):
        Text()
