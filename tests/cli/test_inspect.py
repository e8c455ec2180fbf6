"""`ultraep inspect`: what it prints before and after, how it refuses, how it is interrupted."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")

from inspect_models import save_model, save_tokenizer

from ultraep.tools.cli import app
from ultraep.trace.read import read_trace
from ultraep.trace.replay import differing

QUICK = ("--tokens", 128, "--window", 64, "--sequence-length", 16, "--device", "cpu")
LIMIT = 120  # seconds


def invoke(*arguments, width=100):
    words = ["inspect", *map(str, arguments)]
    return CliRunner().invoke(app, words, env={"COLUMNS": str(width)})


def test_a_random_model(tmp_path):
    result = invoke("--random", "mixtral", *QUICK, "--out", tmp_path, "--no-report")
    assert result.exit_code == 0, result.output
    out = " ".join(result.stdout.split())
    assert (
        "random mixtral: 2.8 million parameters; 4 of 4 layers, 8 experts in each, 2 per t" in out
    )
    assert "code, prose, tables: 384 tokens in 6 windows, sequences of 16" in out
    assert "reads 0 bytes, needs about" in out
    assert "note: weights are random" in out
    assert re.search(r"Imbalance \d\.\d\d -> \d\.\d\d at EP8 under ultraep with 1 slot\.", out)
    assert "policies that place by past windows, at EP8" in out
    assert out.index("takes about") < out.index("Imbalance at every size")
    last = result.stdout.strip().splitlines()[-1]
    assert last.endswith(
        f"ultraep advise --trace {tmp_path}/trace --model {tmp_path}/model.toml "
        "--cluster h200-nvl8 --ep 8"
    )
    assert not (tmp_path / "report.html").exists()
    assert max(map(len, result.stdout.split("trace  ")[0].splitlines())) <= 100


def test_the_last_line_works(tmp_path):
    told = invoke("--random", "mixtral", *QUICK, "--out", tmp_path, "--no-report").stdout
    command = told.strip().splitlines()[-1].partition("ultraep advise ")[2].split()
    shorter = ["--steps", "1", "--microbatches", "1", "--processes", "1"]
    result = CliRunner().invoke(app, ["advise", *command, *shorter])
    assert result.exit_code == 0, result.output
    assert "recorded loads: 6 microbatches of 4 layers" in " ".join(result.stdout.split())


def test_a_checkpoint_with_texts_twice_in_one_folder(tmp_path):
    model = save_model("olmoe", tmp_path / "model")
    save_tokenizer(model)
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"{name} fox and dog " * 99)
    texts = ("--text", tmp_path / "one.txt", "--text", tmp_path / "two.txt")
    for ranks in ("4", "2,16"):
        result = invoke(model, *texts, *QUICK, "--ep", ranks, "--out", tmp_path / "out")
        assert result.exit_code == 0, result.output
    out = " ".join(result.stdout.split())
    assert "model model: 4.4 million parameters; 4 of 4 layers, 16 experts in each" in out
    assert "one, two: 256 tokens in 4 windows" in out
    assert "reads 0 bytes" not in out
    assert "no tokenizer" not in out
    assert "note" not in out
    assert "EP2 EP16" in out
    assert len(read_trace(tmp_path / "out" / "trace")) == 16
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "name the directory of a model, or a family with --random"),
        (["Qwen/Qwen3-30B-A3B"], "Qwen/Qwen3-30B-A3B: no folder of this machine"),
        (["--random", "mixtral", "--ep", "eight"], "--ep must be numbers like 1,2, got 'eight'"),
        (["--random", "mixtral", "--layers", "3-1"], "--layers 3-1: a range runs"),
        (["--random", "mixtral", "--text", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--random", "mixtral", "--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--random", "mixtral", "--out", "/dev/null/folder"], "cannot be written to"),
    ],
)
def test_bad_options_are_one_line(options, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*options)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("ultraep: ")
    assert result.stderr.count("\n") == 1
    assert expected in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_plotly_the_rest_is_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    result = invoke("--random", "mixtral", *QUICK, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "note: the report needs plotly" in result.stdout
    assert (tmp_path / "result.json").is_file()


@pytest.mark.slow
def test_an_interruption_is_told_in_a_line_and_keeps_the_trace(tmp_path):
    """A long one, in a process of its own, which gets a Ctrl-C while it reads."""
    words = ("inspect", "--random", "mixtral", "--tokens", 400_000, "--window", 512, "--out")
    command = [sys.executable, "-m", "ultraep", *map(str, words), tmp_path / "out"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as running:
        pieces = tmp_path / "out" / "trace" / "rank-00000"
        end = time.monotonic() + LIMIT
        while not list(pieces.glob("*.npz")) and time.monotonic() < end:
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        out, errors = running.communicate(timeout=LIMIT)
    assert running.returncode == 130, errors
    assert "Traceback" not in out + errors
    *_, last = errors.strip().splitlines()
    where = tmp_path / "out" / "trace"
    assert last == f"ultraep: interrupted; what was recorded so far is in {where}"
    assert "interrupted" not in out
    trace = read_trace(tmp_path / "out" / "trace")
    assert 0 < len(trace) < 4 * 2000
    assert trace.left_out == 0
    assert differing(trace) == []


def test_nothing_is_asked_of_a_network(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a network was asked")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    model = save_model("mixtral", tmp_path / "model")
    save_tokenizer(model)
    result = invoke(model, *QUICK, "--out", tmp_path / "out", "--no-report")
    assert result.exit_code == 0, result.output
