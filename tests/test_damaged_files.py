"""Damaged files of every format are read, or refused in one line; no file is changed."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ultraep import FileError, workload

SEEDS = range(21, 20_021, 1000)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of memory")
@pytest.mark.parametrize(
    ("first", "last"),
    [(1, 21), *(pytest.param(n, n + 1000, marks=pytest.mark.long) for n in SEEDS)],
)
def test_damaged_and_hostile_files_take_little_memory_and_time(tmp_path, first, last):
    """One process with one gigabyte reads all files through all commands."""
    pytest.importorskip("transformers")
    here = Path(__file__).parent
    child = subprocess.run(
        [sys.executable, here / "hostile_child.py", tmp_path, str(first), str(last)],
        env=os.environ | {"PYTHONPATH": f"{here.parent / 'src'}:{here}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    outcomes = [json.loads(line) for line in child.stdout.splitlines()]
    wrong = [outcome for outcome in outcomes if outcome[2] not in ("fine", "refused")]
    assert not wrong, "\n".join(map(str, wrong))
    assert {words for number, _, words in outcomes if number == -1} == {"fine"}
    assert {words for number, _, words in outcomes if number == 0} == {"refused"}
    assert len({name for _, name, _ in outcomes}) == 18
    ends = Counter(words for number, _, words in outcomes if number > 0)
    assert ends.total() == last - first
    assert min(ends.values()) > (last - first) // 8


FLAWS = {
    "encrypted": (8, 1, "is encrypted"),
    "unknown compression": (10, 99, "compression method is not supported"),
    "new version": (6, 99, "zip file version"),
    "patched data": (8, 0x20, "patched"),
}


@pytest.mark.parametrize("name", FLAWS)
def test_unsupported_archives_are_refused(tmp_path, name):
    offset, value, message = FLAWS[name]
    path = tmp_path / "loads.npz"
    np.savez(path, np.ones((2, 4), dtype=int))
    content = bytearray(path.read_bytes())
    for mark, shift in ((b"PK\x01\x02", 0), (b"PK\x03\x04", -2)):
        content[content.index(mark) + offset + shift] = value
    path.write_bytes(content)
    with pytest.raises(FileError, match=message):
        workload.read_loads(path)
