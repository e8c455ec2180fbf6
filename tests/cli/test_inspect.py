"""`ultraep inspect`: output, files, interruption, and no network."""

import re
import signal
import socket
import subprocess
import time

import pytest

pytest.importorskip("transformers")

from inspect_models import save_model, save_tokenizer

from ultraep.trace.read import read_trace
from ultraep_tools.replay import differing

from . import commands

QUICK = ("--tokens", 128, "--window", 64, "--sequence-length", 16, "--device", "cpu")
LIMIT = 120  # seconds


def invoke(*words):
    return commands.invoke("inspect", *words)


def test_a_random_model(tmp_path):
    result = invoke("--random", "mixtral", *QUICK, "--out", tmp_path, "--no-report")
    assert result.exit_code == 0, result.output
    out = " ".join(result.stdout.split())
    for part in (
        "random mixtral: 2.8 million parameters; 4 of 4 layers, 8 experts in each, 2 per token",
        "code, prose, tables: 384 tokens in 6 windows, sequences of 16",
        "reads 0 bytes, needs about",
        "note: weights are random",
        "policies that plan from past windows, at EP8",
    ):
        assert part in out
    assert re.search(r"Imbalance \d\.\d\d -> \d\.\d\d at EP8 under ultraep with 1 slot\.", out)
    assert out.index("reads 0 bytes") < out.index("Imbalance by group size")
    assert not (tmp_path / "report.html").exists()
    assert max(map(len, result.stdout.split("trace  ")[0].splitlines())) <= 100
    suggested = result.stdout.strip().splitlines()[-1].partition("ultraep advise ")[2].split()
    shorter = ["--steps", "1", "--microbatches", "1", "--processes", "1"]
    assert "recorded loads: 6 microbatches of 4 layers" in commands.flat(
        "advise", *suggested, *shorter
    )


def test_a_checkpoint_with_texts_twice_in_one_directory(tmp_path):
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


@pytest.mark.slow
def test_an_interruption_is_one_line_and_keeps_the_trace(tmp_path):
    """A long one, in a process of its own, which gets a Ctrl-C while it reads."""
    words = ("inspect", "--random", "mixtral", "--tokens", 400_000, "--window", 512, "--out")
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    out = tmp_path / "out"
    with commands.start(*words, out, environment=environment, stdout=subprocess.PIPE) as running:
        pieces = out / "trace" / "rank-00000"
        end = time.monotonic() + LIMIT
        while not list(pieces.glob("*.npz")) and time.monotonic() < end:
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        printed, errors = running.communicate(timeout=LIMIT)
    assert running.returncode == 130, errors
    assert "Traceback" not in printed + errors
    *_, last = errors.strip().splitlines()
    assert last == f"ultraep: interrupted; the records so far are in {out / 'trace'}"
    assert "interrupted" not in printed
    trace = read_trace(out / "trace")
    assert 0 < len(trace) < 4 * 2000
    assert trace.left_out == 0
    assert differing(trace) == []


def test_no_network_is_used(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a network was used")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    model = save_model("mixtral", tmp_path / "model")
    save_tokenizer(model)
    result = invoke(model, *QUICK, "--out", tmp_path / "out", "--no-report")
    assert result.exit_code == 0, result.output
