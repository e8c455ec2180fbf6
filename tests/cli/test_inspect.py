"""`ultraep inspect`: output, files, and no network."""

import re
import socket

import pytest

pytest.importorskip("transformers")

from inspect_models import save_model, save_tokenizer

from ultraep.trace.read import read_trace

from . import commands

QUICK = ("--tokens", 128, "--window", 64, "--sequence-length", 16, "--device", "cpu")


def invoke(*words):
    return commands.invoke("inspect", *words)


def test_a_random_model(tmp_path):
    result = invoke("--random", "mixtral", *QUICK, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    out = " ".join(result.stdout.split())
    for part in (
        "random mixtral: 11.3 MB, 4 of 4 layers, 8 experts in each (cpu, float32)",
        "code, prose, tables: 384 tokens in 6 windows, sequences of 16",
        "note: weights are random",
        "Imbalance by layer, before -> after",
        "Imbalance by text, before -> after",
        f"Look at it: ultraep view {tmp_path}/trace",
    ):
        assert part in out
    assert re.search(r"Imbalance \d\.\d\d -> \d\.\d\d at EP8 with 1 spare slot", out)
    assert result.stderr.startswith("loading torch and transformers for random mixtral")
    assert out.index("model random") < out.index(" -> ") < out.index("Imbalance by number of ranks")
    assert max(map(len, result.stdout.split("trace  ")[0].splitlines())) <= 100


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
    assert "4 of 4 layers, 16 experts in each" in out
    assert "one, two: 256 tokens in 4 windows" in out
    assert "no tokenizer" not in out
    assert "note" not in out
    assert "EP2 EP16" in out
    assert len(read_trace(tmp_path / "out" / "trace")) == 16


def test_no_network_is_used(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a network was used")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    model = save_model("mixtral", tmp_path / "model")
    save_tokenizer(model)
    result = invoke(model, *QUICK, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
