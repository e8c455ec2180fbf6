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
PATIENCE = 240.0  # seconds; only what hangs needs them
WRONG = ("Traceback", "an error of ultraep", "MemoryError", "Unable to allocate", "\n")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/statm").exists(), reason="the size of a process is not known here"
    ),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By the name of what was done: what the reader and the viewer said."""
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
    return {name: said for name, *said in lines}


def test_mutated_traces_are_read_or_refused(found):
    mutated = {name: said for name, said in found.items() if name not in HOSTILE}
    assert len(mutated) == COUNT
    for name, (reader, viewer) in mutated.items():
        for said in (reader, viewer):
            assert not any(word in said for word in WRONG), f"{name}: {said}"
    refused = [bool(reader) for reader, _ in mutated.values()]
    assert COUNT // 4 < sum(refused) < COUNT, "some are damaged, some are still right"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_traces_are_refused_before_they_are_unpacked(found, name):
    reader, viewer = found[name]
    assert HOSTILE[name][2] in reader
    assert not any(word in reader + viewer for word in WRONG)
