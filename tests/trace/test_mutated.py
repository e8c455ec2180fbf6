"""Damaged and hostile traces are read, or refused in one line, in little memory and time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mutated_traces
import pytest
from mutated_traces import HOSTILE

COUNT = 300
PATIENCE = 240.0  # seconds
WRONG = ("Traceback", "an error of ultraep", "MemoryError", "Unable to allocate", "\n")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/statm").exists(), reason="the memory limit needs /proc"
    ),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The messages of reader and viewer, by the name of the damage."""
    tests = Path(mutated_traces.__file__)
    paths = os.pathsep.join(map(str, (tests.parent, tests.parents[1] / "src")))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, tests, str(tmp_path_factory.mktemp("mutated")), str(COUNT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    last = lines[-1][0] if lines else "nothing"
    assert (ended.returncode, ended.stderr) == (0, ""), f"after {last}: {ended.stderr}"
    return {name: messages for name, *messages in lines}


def test_mutated_traces_are_read_or_refused(outcomes):
    mutated = {name: texts for name, texts in outcomes.items() if name not in HOSTILE}
    assert len(mutated) == COUNT
    for name, texts in mutated.items():
        for text in texts:
            assert not any(word in text for word in WRONG), f"{name}: {text}"
    refused = [bool(reader) for reader, _ in mutated.values()]
    assert COUNT // 4 < sum(refused) < COUNT, "some are damaged, some are still valid"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_traces_are_refused_before_they_are_unpacked(outcomes, name):
    reader, viewer = outcomes[name]
    assert HOSTILE[name][2] in reader
    assert not any(word in reader + viewer for word in WRONG)
