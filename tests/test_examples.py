"""The examples run, as one process and under torchrun, and balancing changes no result."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import warm
from demo.runs import start

pytestmark = pytest.mark.filterwarnings("ignore::ultraep.NothingToBalance")  # as one process
ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
LIMIT = 300.0  # seconds; reached only by a program that hangs
SHAPE = ("--hidden", "32", "--ffn", "32", "--layers", "2", "--experts", "8")
TRAIN = (*SHAPE, "--steps", "6", "--tokens", "128", "--length", "16", "--accumulate", "2")
SERVE = ("--requests", "24", "--longest", "48", "--budget", "64", "--rounds", "1")


def torchrun(script, *options, limit=LIMIT):
    """Run an example on two ranks, as a user would."""
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command += (EXAMPLES / script, *options)
    with start(*command, GLOO_SOCKET_IFNAME="lo") as process:
        try:
            out, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its ranks; killed, it would leave them
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def test_the_first_example_balances_and_prints_the_output_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert f"```python\n{(EXAMPLES / 'first.py').read_text()}```" in readme
    done = warm.run_ranks(2, EXAMPLES / "first.py", timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    rows, *rest = done.stdout.splitlines()
    assert "\n".join(rest) in readme
    assert rest == ["imbalance: 1.39 -> 1.00", "replicas: 1"]
    # The processor decides near ties of the router, by the last bit.
    shown = re.search(r"\nrows per rank: .*", readme)[0]
    assert numbers(rows) == pytest.approx(numbers(shown), abs=8)


def on_ranks(script, path, *options, run=None):
    """Return the output of an example on two ranks, and the JSON that it writes."""
    words = [str(word) for word in (*options, "--json", path)]
    run = run or functools.partial(warm.run_ranks, 2, timeout=LIMIT)
    done = run(EXAMPLES / script, *words)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout  # no terminal, no colours
    return done.stdout, json.loads(path.read_text())


@pytest.fixture
def example(monkeypatch):
    """Examples as modules of this process, which is then a group of one."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delenv("RANK", raising=False)
    return import_module


@pytest.mark.slow
def test_training_prefill_and_checkpoints_of_two_ranks(example, tmp_path):
    """Training under two policies learns the same; prefill and one rank load its checkpoint."""
    saved = tmp_path / "saved.pt"
    balanced = ("--policy", "ultraep", "--checkpoint", "--save", saved)
    _, none = on_ranks("train_moe.py", tmp_path / "none.json", *TRAIN, "--policy", "none")
    printed, ours = on_ranks("train_moe.py", tmp_path / "own.json", *TRAIN, *balanced, run=torchrun)
    assert "imbalance before" in printed
    assert ours["losses"] == pytest.approx(none["losses"], rel=1e-4)
    assert ours["loss_held_out"] == pytest.approx(none["loss_held_out"], rel=1e-4)
    assert ours["loss_last"] < ours["loss_first"]
    assert ours["imbalance_after"] < ours["imbalance_before"]
    assert none["imbalance_after"] == none["imbalance_before"] > 1
    expert = 3 * 32 * 32 * 4  # bytes
    assert ours["weights_bytes"] == ours["copies_sent"] * expert > 0
    assert ours["gradients_bytes"] == ours["copies"] * expert > 0
    assert none["copies"] == none["weights_bytes"] == none["gradients_bytes"] == 0
    options = (*SERVE, "--load", saved, "--policy", "none,ultraep")
    printed, (none, served) = on_ranks("prefill.py", tmp_path / "two.json", *options)
    assert "first token" in printed
    assert served["difference"] <= 1e-5
    assert served["imbalance_after"] < served["imbalance_before"] == none["imbalance_after"]
    assert 0 < served["first_token_mean"] <= served["first_token_p95"]
    files = ["--load", str(saved), "--json", str(tmp_path / "alone.json")]
    assert example("train_moe").main([*TRAIN, "--lr", "0", "--steps", "1", *files]) == 0
    alone = json.loads((tmp_path / "alone.json").read_text())
    assert (alone["ranks"], alone["imbalance_before"], alone["imbalance_after"]) == (1, 1, 1)
    assert alone["loss_held_out"] == pytest.approx(ours["loss_held_out"], rel=1e-5)


def test_prefill_as_one_process(example, tmp_path, capsys):
    options = [*SHAPE, *SERVE, "--bitwise", "--rate", "500", "--json", str(tmp_path / "one.json")]
    assert example("prefill").main(options) == 0
    assert "24 requests" in capsys.readouterr().out
    none, ultraep = json.loads((tmp_path / "one.json").read_text())
    assert ultraep["difference"] <= 1e-5
    assert none["imbalance_after"] == ultraep["imbalance_after"] == 1
