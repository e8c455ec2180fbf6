"""The examples run, as one process and under torchrun, and balancing changes no result."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from importlib import import_module
from pathlib import Path

import pytest
import warm

import ultraep
from ultraep.parallel.full_state import moe_layers
from ultraep.tools.tiny import prefill as tiny_prefill

pytestmark = pytest.mark.filterwarnings("ignore::ultraep.NothingToBalance")  # as one process
ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
LIMIT, GRACE = 90.0, 10.0  # seconds for one run, and for torchrun to end its ranks
SHAPE = ("--hidden", "32", "--ffn", "32", "--layers", "2", "--experts", "8")
TRAIN = (*SHAPE, "--steps", "6", "--tokens", "128", "--length", "16", "--accumulate", "2")
SERVE = ("--requests", "24", "--longest", "48", "--budget", "64", "--rounds", "1")


def launch(script, *options, ranks=1, limit=LIMIT):
    """Run an example as one process or under torchrun; nothing of it is left afterwards."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*(torchrun if ranks > 1 else []), str(EXAMPLES / script), *map(str, options)]
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    process = subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit)
    finally:
        end(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def end(process):
    """End the process and what it started, if it is still there."""
    if process.poll() is not None:
        return
    ranks = children(process.pid)  # torchrun gives every rank a process group of its own
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        for group in (process.pid, *ranks):
            os.killpg(group, signal.SIGKILL)
    process.communicate()


def children(pid):
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


def test_the_first_example_balances_and_prints_what_the_readme_shows():
    readme = (ROOT / "README.md").read_text()
    assert f"```python\n{(EXAMPLES / 'first.py').read_text()}```" in readme
    done = warm.run_ranks(2, EXAMPLES / "first.py", patience=LIMIT)
    assert done.returncode == 0, done.stderr
    rows, *rest = done.stdout.splitlines()
    assert "\n".join(rest) in readme
    assert rest == ["imbalance: 1.39 -> 1.00", "replicas: 1"]
    # Near ties of the router are decided by the last bit, so by the processor.
    shown = re.search(r"\nrows per rank: .*", readme)[0]
    for here, there in zip(numbers(rows), numbers(shown), strict=True):
        assert abs(here - there) <= 8


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def train(path, *options, torchrun):
    words = [str(word) for word in (*options, "--json", path)]
    if torchrun:
        done = launch("train_moe.py", *words, ranks=2)
    else:
        done = warm.run_ranks(2, EXAMPLES / "train_moe.py", *words, patience=LIMIT)
    assert done.returncode == 0, done.stderr
    assert "imbalance before" in done.stdout
    assert "\x1b" not in done.stdout  # no terminal, no colours
    return json.loads(path.read_text())


def prefill(path, *options, ranks):
    done = launch("prefill.py", *options, "--json", path, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert "first token" in done.stdout
    return {row["policy"]: row for row in json.loads(path.read_text())}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A training under two policies, on two ranks; that of the second is saved."""
    folder = tmp_path_factory.mktemp("trained")
    balanced = ("--policy", "ultraep", "--checkpoint", "--save", folder / "saved.pt")
    return {
        "folder": folder,
        "none": train(folder / "none.json", *TRAIN, "--policy", "none", torchrun=False),
        "ultraep": train(folder / "ultraep.json", *TRAIN, *balanced, torchrun=True),
    }


@pytest.mark.slow
def test_training_is_balanced_and_learns_the_same(trained):
    none, ultraep = trained["none"], trained["ultraep"]
    assert ultraep["losses"] == pytest.approx(none["losses"], rel=1e-4)
    assert ultraep["loss_held_out"] == pytest.approx(none["loss_held_out"], rel=1e-4)
    assert ultraep["loss_last"] < ultraep["loss_first"]
    assert ultraep["imbalance_after"] < ultraep["imbalance_before"]
    assert ultraep["imbalance_after_worst"] <= ultraep["imbalance_before_worst"]
    assert none["imbalance_after"] == none["imbalance_before"] > 1


@pytest.mark.slow
def test_summary_counts_what_moved(trained):
    none, ultraep = trained["none"], trained["ultraep"]
    expert = 3 * 32 * 32 * 4  # bytes
    assert ultraep["ranks"] == 2
    assert ultraep["copies"] > 0
    assert ultraep["copies_sent"] > 0
    assert ultraep["weights_bytes"] == ultraep["copies_sent"] * expert
    assert ultraep["gradients_bytes"] == ultraep["copies"] * expert
    assert none["copies"] == none["weights_bytes"] == none["gradients_bytes"] == 0
    assert ultraep["pool_bytes"] >= expert
    assert {"loads", "plan", "replicate", "reroute", "reduce"} <= set(ultraep["seconds"])


@pytest.mark.slow
def test_prefill_of_two_ranks_agrees(trained):
    folder = trained["folder"]
    options = (*SERVE, "--load", folder / "saved.pt", "--policy", "none,ultraep")
    found = prefill(folder / "two.json", *options, ranks=2)
    none, ultraep = found["none"], found["ultraep"]
    assert ultraep["difference"] <= 1e-5
    assert ultraep["imbalance_after"] < ultraep["imbalance_before"] == none["imbalance_after"]
    assert ultraep["weights_bytes"] > 0 == none["weights_bytes"]
    assert 0 < ultraep["first_token_mean"] <= ultraep["first_token_p95"]


@pytest.fixture
def example(monkeypatch):
    """Examples as modules of this process, which is then a group of one."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delenv("RANK", raising=False)
    return import_module


@pytest.mark.slow
def test_checkpoint_of_two_ranks_loads_on_one(trained, example):
    path = trained["folder"] / "alone.json"
    files = ["--load", str(trained["folder"] / "saved.pt"), "--json", str(path)]
    assert example("train_moe").main([*TRAIN, "--lr", "0", "--steps", "1", *files]) == 0
    alone = json.loads(path.read_text())
    assert alone["ranks"] == 1
    assert alone["loss_held_out"] == pytest.approx(trained["ultraep"]["loss_held_out"], rel=1e-5)
    assert alone["imbalance_before"] == alone["imbalance_after"] == 1


def test_prefill_as_one_process(example, tmp_path, capsys):
    options = [*SHAPE, *SERVE, "--bitwise", "--rate", "500", "--json", str(tmp_path / "one.json")]
    assert example("prefill").main(options) == 0
    assert "24 requests" in capsys.readouterr().out
    none, ultraep = json.loads((tmp_path / "one.json").read_text())
    assert ultraep["difference"] <= 1e-5
    assert none["imbalance_after"] == ultraep["imbalance_after"] == 1


def test_prefill_tells_when_outputs_differ(example, monkeypatch, capsys):
    right = tiny_prefill.first_logits

    def wrong(model, texts):
        policy = next(iter(moe_layers(model).values())).balancer.config.policy
        return right(model, texts) * (1.01 if policy == "ultraep" else 1)

    monkeypatch.setattr(tiny_prefill, "first_logits", wrong)
    assert example("prefill").main([*SHAPE, *SERVE]) == 1
    assert "outputs of none and ultraep differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "options", "told"),
    [
        ("train_moe", ["--tokens", "100", "--length", "64"], "no multiple"),
        ("train_moe", ["--policy", "nonsense"], "invalid choice"),
        ("prefill", ["--policy", "none,nonsense"], "nonsense"),
        ("prefill", ["--longest", "2000"], "--budget"),
    ],
)
def test_nonsense_is_refused(example, script, options, told, capsys):
    with pytest.raises(SystemExit) as refused:
        example(script).main(options)
    assert refused.value.code == 2
    assert told in capsys.readouterr().err


def test_a_checkpoint_of_another_shape_is_refused(example):
    options, train_moe = example("options"), example("train_moe")
    saved = {"hidden": 64, "experts": 8}
    with pytest.raises(ValueError, match=r"not \{'experts': 16\}"):
        options.model_config(train_moe.parse(["--experts", "16"]), saved)


def test_a_machine_without_a_library_is_an_error(example, monkeypatch, tmp_path):
    text = example("library_text")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    for read in (text.library_text, text.library_bytes):
        with pytest.raises(ultraep.FileError, match="no text in Python's library"):
            read()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_needs_nothing_of_the_demo(path):
    assert "ultraep.tools.demo" not in path.read_text()
