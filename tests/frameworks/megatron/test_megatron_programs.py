"""The example and the benchmark of Megatron-Core run, and balancing changes no loss."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run(*command):
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_prints_losses_side_by_side():
    lines = run(*TORCHRUN, ROOT / "examples" / "megatron_train.py", "--steps", 4).splitlines()
    head = lines.index("step   unmodified   balanced")
    pairs = [line.split() for line in lines[head + 1 : head + 5]]
    assert [pair[0] for pair in pairs] == ["0", "1", "2", "3"]
    for _, plain, ours in pairs:
        assert abs(float(plain) - float(ours)) < 1e-5
    assert float(pairs[-1][1]) < float(pairs[0][1])
    assert lines[-1].startswith("imbalance ")


def test_the_benchmark_runs():
    printed = run(ROOT / "benchmarks" / "bench_frameworks.py", "--toy", "--only", "megatron")
    for name in ("unmodified", "none", "ultraep", "random even routing"):
        assert name in printed
