"""The example and the benchmark of Megatron-Core."""

from test_benchmarks import run
from test_examples import torchrun


def test_the_example_prints_losses_side_by_side():
    done = torchrun("megatron_train.py", "--steps", "4")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    head = lines.index("step   unmodified   balanced")
    rows = [line.split() for line in lines[head + 1 : head + 5]]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    for _, plain, balanced in rows:
        assert abs(float(plain) - float(balanced)) < 1e-5
    assert float(rows[-1][1]) < float(rows[0][1])
    assert lines[-1].startswith("imbalance ")


def test_the_benchmark_runs():
    done = run("bench_frameworks.py", "--toy", "--only", "megatron")
    assert done.returncode == 0, done.stderr
    for name in ("unmodified", "none", "ultraep", "random even routing"):
        assert name in done.stdout


def test_the_benchmark_prints_losses():
    done = run("bench_frameworks.py", "--toy", "--losses", "--only", "megatron")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    [balanced] = [line for line in lines if line[:1] == ["ultraep"] and len(line) == 6]
    assert float(balanced[3]) < 0.1  # thousandths by which a loss differs
    assert float(balanced[4]) > 0  # replicas
