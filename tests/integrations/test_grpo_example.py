"""The example with TRL's GRPO on two CPU ranks. TRL is not among the packages for development."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install trl")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_replay.py"
LIMIT = 240.0  # seconds


def test_training_replays_the_routes_of_the_rollout():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, EXAMPLE, "--steps", "3"], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    steps = re.findall(
        r"step (\d): reward [\d.]+, imbalance ([\d.]+) -> ([\d.]+), ([\d.]+) r", done.stdout
    )
    assert [step for step, *_ in steps] == ["1", "2", "3"]
    for _, before, after, replicas in steps:
        assert float(after) < float(before)
        assert float(replicas) > 0
    replayed = re.findall(r"rank (\d): (\d+) of (\d+) routes replayed", done.stdout)
    assert sorted(rank for rank, *_ in replayed) == ["0", "1"]
    assert all(same == total != "0" for _, same, total in replayed)
