"""examples/pretrain.py checks its settings and stops on all ranks together; killed jobs resume."""

import json
import math
import os
import signal
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import pytest
import torch
import warm
from restarts import PRETRAIN, check

import ultraep

pytestmark = pytest.mark.filterwarnings("ignore::ultraep.NothingToBalance")  # as one process
ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
LIMIT = 300.0  # seconds; reached only by a program that hangs
# Neither 1 nor 2 ranks share the nine windows evenly.
TINY = PRETRAIN | {"training.steps": 6, "training.batch": 16, "training.microbatches": 2}
TINY |= {"evaluation.every": 3, "evaluation.windows": 9}
SCALARS = (
    *("loss", "held_out_loss", "held_out_bits_per_byte", "learning_rate", "gradient_norm"),
    *("imbalance_before", "imbalance_after", "replicas", "tokens_per_second"),
)


def options(folder, **changes):
    """Arguments of a tiny run into this folder; `training__lr` is training.lr."""
    own = {"checkpoints.folder": folder, "logging.folder": folder}
    own |= {name.replace("__", "."): value for name, value in changes.items()}
    listed = ["--no-tensorboard"]
    for name, value in (TINY | own).items():
        listed += ["--set", f"{name}={value}"]
    return listed


def start(*runs):
    """Start two ranks that do these runs, one after the other, without torchrun."""
    jobs = [(warm.free_port(), [str(word) for word in run]) for run in runs]
    return warm.start_ranks(2, drive, jobs)


def drive(jobs):
    sys.path.insert(0, str(EXAMPLES))
    pretrain = import_module("pretrain")
    torch.set_num_threads(1)
    for port, argv in jobs:
        os.environ["MASTER_PORT"] = port
        if pretrain.main(argv):
            sys.exit(1)


def scalars(folder, name="loss", after=0):
    lines = map(json.loads, (folder / "scalars.jsonl").read_text().splitlines())
    return {line["step"]: line[name] for line in lines if name in line and line["step"] > after}


def checkpoint(folder, step):
    return folder / f"step-{step:08d}.pt"


@pytest.fixture
def pretrain(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delenv("RANK", raising=False)
    return import_module("pretrain")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    exact = {"training__precision": "float64", "training__even": 0}
    runs = [
        options(root / "whole", checkpoints__keep=2, logging__record=root / "traces"),
        options(root / "exact", **exact, parallel__ep=1),
    ]
    for rank in start(*runs):
        done = rank.finish(LIMIT)
        assert done.returncode == 0, done.stderr
    return root


@pytest.mark.slow
def test_training_learns_is_balanced_and_leaves_its_files(two):
    whole = {name: scalars(two / "whole", name) for name in SCALARS}
    assert list(whole["loss"]) == [1, 2, 3, 4, 5, 6]
    assert whole["loss"][6] < whole["loss"][1]
    assert list(whole["held_out_loss"]) == [3, 6]
    bits = whole["held_out_bits_per_byte"][6]
    assert bits == pytest.approx(whole["held_out_loss"][6] / math.log(2))
    for step, before in whole["imbalance_before"].items():
        assert whole["imbalance_after"][step] < before
    for name in ("replicas", "tokens_per_second", "gradient_norm"):
        assert sum(whole[name].values()) > 0
    rates = list(whole["learning_rate"].values())
    assert rates[:3] == pytest.approx([1.5e-3, 3e-3, 3e-3])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    kept = sorted(path.name for path in (two / "whole").glob("step*"))
    assert kept == ["step-00000004.pt", "step-00000006.pt"]
    (folder,) = (two / "traces").iterdir()
    assert folder.name == "0000-from-step-0-group-0"
    assert ultraep.read_trace(folder).topology.ranks == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "precision", "even", "near"),
    [("exact", "float64", 0, 1e-10), ("whole", "float32", 0.01, 1e-5)],
)
def test_two_ranks_go_on_as_one(two, pretrain, tmp_path, run, precision, even, near):
    changes = {"training__precision": precision, "training__even": even}
    resume = ["--resume", str(checkpoint(two / run, 4))]
    assert pretrain.main([*options(tmp_path, **changes), *resume]) == 0
    for name in ("loss", "held_out_loss", "gradient_norm"):
        expected = scalars(two / run, name, after=4)
        assert scalars(tmp_path, name) == pytest.approx(expected, rel=near)


@pytest.mark.slow
def test_ctrl_c_on_one_rank_stops_all_and_loses_nothing(pretrain, tmp_path):
    processes = start(options(tmp_path, training__steps=100_000))
    processes[0].wait_for("step      2")
    os.kill(processes[1].process.pid, signal.SIGINT)
    first, second = (process.finish(LIMIT) for process in processes)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "stopped after step" in first.stdout
    newest = sorted(tmp_path.glob("step-*.pt"))[-1]
    step = torch.load(newest)["step"]
    assert step == max(scalars(tmp_path))
    goal = options(tmp_path, training__steps=step + 1)
    assert pretrain.main([*goal, "--resume"]) == 0
    assert list(scalars(tmp_path)) == list(range(1, step + 2))


def test_one_process_with_text_of_its_own(pretrain, tmp_path, capsys):
    texts = tmp_path / "texts"
    (texts / "more").mkdir(parents=True)
    for number, name in enumerate(("one.txt", "more/two.txt", "left.out")):
        (texts / name).write_bytes(bytes([65 + number]) * 1500)
    single = tmp_path / "single.md"
    single.write_bytes(b"D" * 1500)
    files = json.dumps([str(texts), str(single)])
    run = options(tmp_path / "run", data__files=files, training__steps=2)
    assert pretrain.main(run) == 0
    assert "written: " in capsys.readouterr().out
    data = import_module("pretrain_parts").read_text(json.loads(files), "*.txt")
    assert {byte: data.count(byte) for byte in b"ABCD"} == {65: 1500, 66: 1500, 67: 0, 68: 1500}
    assert pretrain.main(run) == 1
    assert "holds step 2, this run starts at 0: use --resume" in capsys.readouterr().err
    assert pretrain.main([*run, "--resume"]) == 0
    assert "nothing to do: the checkpoint has 2 steps of 2" in capsys.readouterr().out
    more = ["--set", "training.steps=3", "--resume"]
    for change, message in {
        "model.ffn=64": "ffn was 32 in the checkpoint, now it is 64",
        "training.length=16": "length was 32 in the checkpoint, now it is 16",
        "data.held_out=10": "held_out was 20 in the checkpoint, now it is 10",
        "data.files=[]": "text was ",
    }.items():
        assert pretrain.main([*run, *more, "--set", change]) == 1
        assert message in capsys.readouterr().err


def test_elastic_needs_a_store_for_every_attempt(pretrain, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert pretrain.main([*options(tmp_path), "--elastic"]) == 2
    message = capsys.readouterr().err
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in message
    assert message.count("\n") == 1


def test_the_shipped_file_has_all_settings_and_their_defaults(pretrain):
    settings = import_module("pretrain_settings")
    path = str(EXAMPLES / "pretrain.toml")
    read, defaults = settings.read_settings(path), settings.Settings()
    assert read == defaults
    content = settings.read_toml(path)
    assert {name: set(part) for name, part in content.items()} == {
        name: set(part) for name, part in asdict(defaults).items()
    }


# Options, exit code, and what the line says.
ERRORS = [
    ("--set training.stepz=3", 2, "unknown setting training.stepz; there are steps, batch"),
    ("--set steps=3", 2, "--set wants section.key=value, got 'steps=3'"),
    ("--set training.steps=0", 2, "training.steps must be at least 1, and finite, got 0"),
    ("--set balance.policy=best", 2, "balance.policy must be one of"),
    ("--set data.files=text.txt", 2, "data.files must be a list of texts, got 'text.txt'"),
    ("--set model.top_k=17", 2, "model.top_k 17 is more than model.experts 16"),
    ("--set parallel.ep=2", 2, "parallel.ep 2 does not divide 1 ranks"),
    ("--config gone.toml", 2, "No such file"),
    ("--config bad.toml", 2, "unknown section [steps]"),
    ("--set training.length=10000000", 1, "too few for two windows of 10000000 bytes"),
    ("--resume gone.pt", 1, "gone.pt: cannot be read: No such file"),
    ("--resume other.pt", 1, "other.pt is not a checkpoint of pretrain.py"),
    ("--resume torn.pt", 1, "torn.pt: "),
    ("--resume", 1, "no checkpoint in "),
]


def test_errors_are_one_line(pretrain, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text("steps = 3")
    torch.save({"model": {}}, "other.pt")
    Path("torn.pt").write_bytes(b"PK")
    for words, code, message in ERRORS:
        before = options(tmp_path) if code == 1 else []
        assert pretrain.main([*before, *words.split()]) == code, words
        line = capsys.readouterr().err
        assert message in line
        assert line.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pretrain", "trainer"])
def test_a_job_resumes_after_two_kills(name, tmp_path):
    if name == "trainer":
        pytest.importorskip("accelerate")
        pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)
    check(name, tmp_path)
