"""The example of torchtitan prints the same losses twice under torchrun; the benchmark runs."""

import json

import torch
from test_benchmarks import run
from test_examples import torchrun


def test_losses_side_by_side(tmp_path):
    path = tmp_path / "logged.json"
    done = torchrun("torchtitan_train.py", "--steps", "3", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step   unmodified     balanced   difference   imbalance")
    losses = [
        [step["loss_metrics/global_avg_loss"] for step in run]
        for run in json.loads(path.read_text())
    ]
    assert len(losses[0]) == 3
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-5, atol=0)


def test_the_benchmark_runs():
    done = run("bench_frameworks.py", "--toy", "--only", "torchtitan")
    assert done.returncode == 0, done.stderr
    for name in ("unmodified", "none", "ultraep", "random even routing"):
        assert name in done.stdout
