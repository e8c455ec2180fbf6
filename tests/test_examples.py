"""The examples run under torchrun, and balancing changes no result."""

import functools
import os
import re
import subprocess
from pathlib import Path

import pytest
import warm
from demo.runs import start
from test_docs import options as known_options

from ultraep.integrations.megatron.settings import REFUSED

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


@pytest.mark.parametrize("name", ["megatron", "torchtitan", "transformers"])
def test_an_sbatch_file_checks_before_it_trains(name, tmp_path):
    for program, text in {
        "srun": 'echo "$*" | tee -a calls; exit $FAIL',
        "scontrol": "echo node0",
    }.items():
        (tmp_path / program).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / program).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-3]", "SLURM_NNODES": "4"}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(fail):
        return subprocess.run(
            ["bash", EXAMPLES / "slurm" / f"{name}.sbatch", "checkpoint"],
            env=os.environ | job | path | {"FAIL": fail},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    done = run("0")
    assert done.returncode == 0, done.stderr
    host, group, training = done.stdout.splitlines()
    assert host == "ultraep check"
    launcher, options = group.split(" -m ultraep check ")
    assert known_options().issuperset(re.findall("--[a-z]+", options))
    assert training.startswith(launcher)
    off = [refused.setting for refused in REFUSED if refused.supported == (False,)]
    assert not any(setting.replace("_", "-") in training for setting in off)
    failed = run("1")
    assert (failed.returncode, failed.stdout) == (1, "ultraep check\n")
