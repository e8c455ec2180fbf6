"""Damaged files of every format are read, or refused in one line; no file is changed."""

import json
import os
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ultraep import FileError, read_trace, workload
from ultraep.files.reading import read_arrays
from ultraep.trace import files

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


def packed_zeros(path, **shapes):
    np.savez_compressed(path, **{n: np.zeros(shape, np.int32) for n, shape in shapes.items()})
    return path


def test_arrays_that_unpack_to_too_much_are_refused(tmp_path):
    path = packed_zeros(tmp_path / "loads.npz", a=(1 << 17,), b=(1 << 17,))
    assert read_arrays(path, ["a"], most=1 << 20).keys() == {"a"}
    with pytest.raises(FileError, match="unpack to 1,048,832 bytes, but at most 1,048,576"):
        read_arrays(path, most=1 << 20)


def test_traces_that_unpack_to_far_more_than_their_size_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SMALL", 1 << 20)
    path = packed_zeros(tmp_path / "trace.npz", header=(1 << 20,))
    with pytest.raises(FileError, match="claim to unpack to 4,194,"):
        read_trace(path)


def test_archives_of_other_things_are_refused(tmp_path):
    path = tmp_path / "loads.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "no array")
    with pytest.raises(FileError, match="a file that is not an array"):
        workload.read_loads(path)
