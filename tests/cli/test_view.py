"""`ultraep view`: what it refuses, what it writes, and that Ctrl-C ends it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from traces import plan_for, record
from typer.testing import CliRunner

from ultraep.tools.cli.commands import app
from ultraep.trace.files import write_arrays

httpx = pytest.importorskip("httpx")
pytest.importorskip("plotly")

from ultraep.tools.view.server import listening_socket  # noqa: E402

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return record(
        tmp_path_factory.mktemp("view") / "run", [plan_for(n) for n in range(6)], layers=2
    )


def invoke(*words):
    return CliRunner().invoke(app, ["view", *map(str, words)])


def test_a_page_to_share(run, tmp_path):
    result = invoke(run, "--export", tmp_path / "run.html")
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'run.html'}: 6 records\n")
    page = (tmp_path / "run.html").read_text("utf-8")
    assert '<meta name="generator" content="ultraep">' in page[:4096]
    assert "default-src 'none'" in page


def bad(name, folder, run):
    shutil.copytree(run, folder / "other")
    header = folder / "other/header.json"
    text = header.read_text()
    newer = json.dumps(json.loads(text) | {"version": 99})
    header.write_text(newer if name == "newer" else text[:30])
    return folder / "other"


@pytest.mark.parametrize(
    ("name", "words"), [("newer", "a trace of version 99"), ("torn", "truncated or damaged")]
)
def test_what_cannot_be_shown_is_told(run, tmp_path, name, words):
    other = bad(name, tmp_path, run)
    result = invoke(other)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "none of this can be shown" in result.stderr
    result = invoke(other, run, "--export", tmp_path / "run.html")
    assert result.exit_code == 0, result.stderr
    assert words in result.stderr


def test_a_damaged_piece_is_told_on_the_terminal_as_well(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    write_arrays(other / "rank-00001" / "000001.npz", {"step": np.zeros(2)})
    result = invoke(other, "--export", tmp_path / "other.html")
    assert result.exit_code == 0, result.stderr
    (line,) = result.stderr.splitlines()
    assert re.match(r"ultraep: .*rank-00001/000001\.npz: not a piece of a trace", line)
    assert "000001.npz: not a piece of a trace" in (tmp_path / "other.html").read_text("utf-8")


REFUSED = {
    "missing": (["gone"], "gone: no such file or folder"),
    "live export": (["run", "--live", "--export", "a.html"], "does not go with --live"),
    "two": (["run", "again", "--export", "a.html"], "--export writes one trace, but 2 are open"),
    "unwritable": (["run", "--export", "no/such/a.html"], "cannot be written"),
    "port": (["run", "--port", "70000"], "--port must lie in 0..65535, got 70000"),
    "host": (["run", "--host", "no.such.invalid"], "--host no.such.invalid"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_line(run, tmp_path, monkeypatch, name):
    words, said = REFUSED[name]
    for copy in ("run", "again"):
        shutil.copytree(run, tmp_path / copy)
    monkeypatch.chdir(tmp_path)
    result = invoke(*words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_port_in_use_is_one_line(run):
    with listening_socket("127.0.0.1", 0) as taken:
        result = invoke(run, "--port", taken.getsockname()[1])
    assert result.exit_code == 2
    assert "cannot be used" in result.stderr


def test_a_missing_plotly_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    result = invoke(run, "--port", "0")
    assert result.exit_code == 2
    assert re.search(r"pip install 'ultraep\[(view|plot)\]'", result.stderr)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_ended(run, number):
    process = subprocess.Popen(
        [sys.executable, "-m", "ultraep", "view", str(run), "--port", "0"],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline()
    assert re.match(r"http://127.0.0.1:\d+/  \(Ctrl-C ends it\)\n", line)
    assert httpx.get(line.split()[0], trust_env=False, timeout=60).status_code == 200
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (out, err) == ("", "")
    assert process.returncode == (0 if number == signal.SIGINT else -signal.SIGTERM)
