"""The examples run under torchrun, and balancing changes no result."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest
import warm
from demo.runs import start

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
LIMIT = 300.0  # seconds; reached only by a program that hangs


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
    waiting, rows, *rest = done.stdout.splitlines()
    assert f"\n{waiting}\nrows per rank" in readme
    assert "\n".join(rest) in readme
    assert rest == ["imbalance: 1.39 -> 1.00", "replicas: 1"]
    # The processor decides near ties of the router, by the last bit.
    shown = re.search(r"\nrows per rank: .*", readme)[0]
    assert numbers(rows) == pytest.approx(numbers(shown), abs=8)


@pytest.mark.slow
def test_training_under_two_policies_learns_the_same():
    losses, imbalances = [], []
    for policy, run in (
        ("none", torchrun),
        ("ultraep", functools.partial(warm.run_ranks, 2, timeout=LIMIT)),
    ):
        done = run(EXAMPLES / "train_moe.py", "--steps", "11", "--policy", policy)
        assert done.returncode == 0, done.stderr
        losses.append([float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)])
        last = done.stdout.splitlines()[-1]
        imbalances.append([float(value) for value in re.findall(r"[\d.]+", last)])
    none, ours = losses
    assert len(ours) == 2
    assert ours == pytest.approx(none, rel=1e-3)
    assert ours[1] < ours[0]
    (before, same), (before_ours, after) = imbalances
    assert before == same > 1
    assert before_ours == pytest.approx(before, rel=0.05)
    assert after < before_ours
