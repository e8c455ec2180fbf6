"""Damaged files of every format that is read: fine, or one line; nothing is written to but outputs.

Some hundred here; `pytest -m long` damages twenty thousand.
"""

import json
import os
import random
import resource
import subprocess
import sys
import time
import tracemalloc
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from cli.test_demo import RESULT
from damage import damaged
from traces import plan_for, record
from typer.testing import CliRunner

from ultraep import FileError, UltraEPError, read_trace, workload
from ultraep.files.reading import read_array, read_arrays
from ultraep.tools.cli import app
from ultraep.tools.demo.result import DemoResult
from ultraep.tools.sim.cluster import load_cluster
from ultraep.tools.sim.model import load_model
from ultraep.tools.sim.serving import load_requests

FEW, MANY, BLOCK = 200, 20_000, 100  # files, and those of a test
SEEDS = range(321, 5321, 1000)
THROUGH_COMMANDS = 5  # of so many files one goes through the command line, too
LONGEST = 20.0  # seconds for one file
MOST_MEMORY = 400 << 20  # bytes more than before
DATA = Path(load_cluster.__code__.co_filename).parent / "data"
ROUTING = ("plan", "--ranks", 2, "--window", 8)


def write_loads(folder):
    """Sound files of loads and of routing, in every format."""
    loads = np.random.default_rng(0).integers(0, 99, (3, 2, 4))
    np.save(folder / "loads.npy", loads)
    np.save(folder / "columns.npy", np.asfortranarray(loads[0]))
    np.savez(folder / "loads.npz", *loads)
    np.savez_compressed(folder / "packed.npz", *loads)
    lines = ["\n".join(",".join(map(str, row)) for row in matrix) for matrix in loads.tolist()]
    (folder / "loads.csv").write_text("\n\n".join(lines) + "\n")
    (folder / "loads.json").write_text(json.dumps({"loads": loads.tolist()}))
    ids = np.random.default_rng(1).integers(0, 4, (40, 2, 2)).astype(np.uint8)
    np.savez_compressed(folder / "routing.npz", a_ids=ids, a_seq_lens=np.array([40]))


def write_all(folder):
    """Sound files of every format."""
    write_loads(folder)
    run = record(folder / "run", [plan_for(seed) for seed in range(6)], layers=2, note="here")
    read_trace(run).save(folder / "trace.npz")
    for kind in ("clusters", "models", "requests"):
        (folder / f"{kind}.toml").write_bytes((DATA / f"{kind}.toml").read_bytes())
    RESULT.save(folder)


def look_at(trace):
    """Everything that the commands ask a trace for."""
    _ = trace.imbalance_before, trace.imbalance_after, trace.num_copies, trace.by_layer()
    for index in range(len(trace)):
        trace.plan(index)


def whole_trace(path):
    """A file, or the folder around a piece of one."""
    inside = next((parent for parent in path.parents if parent.name == "run"), path)
    look_at(read_trace(inside))


def count_routing(path):
    for ids in workload.read_routing(path):
        workload.loads_of_windows(ids, ranks=2, experts=4, tokens=8)


READERS = {  # what reads a file in Python, and the commands that it is given to
    "loads.npy": (workload.read_loads, [("plan",)]),
    "columns.npy": (workload.read_loads, [("plan", "--policy", "eplb,quota")]),
    "loads.npz": (workload.read_loads, [("plan",)]),
    "packed.npz": (workload.read_loads, [("plan", "--policy", "lplb,llep")]),
    "loads.csv": (workload.read_loads, [("plan",)]),
    "loads.json": (workload.read_loads, [("plan", "--json")]),
    "routing.npz": (count_routing, [ROUTING]),
    "trace.npz": (whole_trace, [("trace", "info"), ("trace", "replay"), ("plan",)]),
    "run/header.json": (whole_trace, [("trace", "info"), ("trace", "replay")]),
    "run/rank-00000/000000.npz": (whole_trace, [("trace", "info"), ("trace", "replay")]),
    "run/rank-00001/000000.npz": (whole_trace, [("trace", "info"), ("trace", "replay")]),
    "clusters.toml": (lambda path: load_cluster(f"{path}"), []),
    "models.toml": (lambda path: load_model(f"{path}"), []),
    "requests.toml": (lambda path: load_requests(f"{path}"), []),
    "result.json": (lambda path: DemoResult.load(path.parent), []),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    write_all(folder)
    return folder


def content_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def outcome_of_reader(read, path):
    try:
        read(path)
    except UltraEPError as error:
        return "refused" if "\n" not in str(error) else "refused in many lines"
    return "fine"


def outcome_of_command(arguments, out):
    """Its exit code; a traceback would be an exception here."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code == 2:
        assert result.stderr.count("\n") == 1, result.stderr
        assert result.stderr.startswith("ultraep: ")
    assert result.exit_code in (0, 1, 2)  # 1: plans that differ from those recorded
    return f"exit code {result.exit_code}"


def through_commands(path, commands, out):
    target = next((parent for parent in path.parents if parent.name == "run"), path)
    for name, *options in commands:
        place = 1 if name == "trace" else 0  # behind its own command
        yield outcome_of_command((name, *options[:place], target, *options[place:]), out)
    if commands and commands[0][0] == "trace":
        names = {"--csv": "a.csv", "--perfetto": "a.json", "--npz": "a.npz"}
        options = [word for option, file in names.items() for word in (option, out / file)]
        yield outcome_of_command(("trace", "export", target, *options), out)


@pytest.mark.parametrize(
    "first",
    [
        *range(0, FEW, BLOCK),
        *(pytest.param(n, marks=pytest.mark.long) for n in range(FEW, MANY, BLOCK)),
    ],
)
def test_damage_is_survived(sound, tmp_path, first):
    folder, out, found = tmp_path / "files", tmp_path / "out", Counter()
    out.mkdir()
    write_all(folder_of(folder))
    whole = content_of(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(first, first + BLOCK):
        rng = random.Random(number)
        name = rng.choice(sorted(READERS))
        read, commands = READERS[name]
        path = folder / name
        path.write_bytes(damaged(whole[path], rng))
        given, began = path.read_bytes(), time.monotonic()
        try:
            found["reader", outcome_of_reader(read, path)] += 1
            if number % THROUGH_COMMANDS == 0:
                found.update(("command", end) for end in through_commands(path, commands, out))
        except Exception as error:
            raise AssertionError(f"{name}, damaged with seed {number}") from error
        assert time.monotonic() - began < LONGEST, f"{name}, damaged with seed {number}"
        assert content_of(folder) == whole | {path: given}, f"{name}, damaged with seed {number}"
        path.write_bytes(whole[path])
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert more << 10 < MOST_MEMORY
    print(dict(found))
    assert {end for _, end in found} <= {"fine", "refused", *(f"exit code {n}" for n in range(3))}
    assert found["reader", "refused"] > 0 < found["reader", "fine"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of memory")
@pytest.mark.parametrize(
    ("first", "last"),
    [(1, 321), *(pytest.param(n, n + 1000, marks=pytest.mark.long) for n in SEEDS)],
)
def test_hostile_files_take_little_memory_and_time(tmp_path, first, last):
    """All commands but those for traces; one process reads all files, with one gigabyte."""
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
    found = [json.loads(line) for line in child.stdout.splitlines()]
    wrong = [one for one in found if one[2] not in ("fine", "refused")]
    assert not wrong, "\n".join(map(str, wrong))
    assert {words for number, _, words in found if number == -1} == {"fine"}
    assert {words for number, _, words in found if number == 0} == {"refused"}
    assert len({name for _, name, _ in found}) == 18
    ends = Counter(words for number, _, words in found if number > 0)
    assert ends.total() == last - first
    assert min(ends.values()) > 100


def folder_of(path):
    path.mkdir()
    return path


def test_sound_files_are_fine(sound):
    for name, (read, commands) in READERS.items():
        read(sound / name)
        for end in through_commands(sound / name, commands, sound.parent):
            assert end == "exit code 0"
    (sound.parent / "a.csv").unlink()
    (sound.parent / "a.json").unlink()
    (sound.parent / "a.npz").unlink()


# -- claims --------------------------------------------------------------------------------------


def claims(folder):
    """Small files that claim to hold four gigabytes and more."""
    shape = b"(1073741824, 4)"
    np.save(folder / "huge.npy", np.ones((2, 4), dtype=np.int8))
    content = (folder / "huge.npy").read_bytes()
    header = content[:128].replace(b"(2, 4)", shape).replace(b" " * (len(shape) - 6) + b"\n", b"\n")
    (folder / "huge.npy").write_bytes(header + content[128:])
    with zipfile.ZipFile(folder / "huge.npz", "w") as archive:
        archive.writestr("loads.npy", header + content[128:])
    np.savez(folder / "declared.npz", np.ones((2, 4), dtype=np.int8))
    content = bytearray((folder / "declared.npz").read_bytes())
    central = content.index(b"PK\x01\x02")
    content[central + 24 : central + 28] = (2**32 - 2).to_bytes(4, "little")
    (folder / "declared.npz").write_bytes(content)
    return sorted(folder.iterdir())


def test_no_memory_is_taken_for_what_a_file_only_claims(tmp_path):
    for path in claims(tmp_path):
        tracemalloc.start()
        try:
            with pytest.raises(FileError, match="bytes"):
                workload.read_loads(path)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


FLAWS = {
    "encrypted": (8, 1, "is encrypted"),
    "unknown compression": (10, 99, "unknown compression, 99"),
    "new version": (6, 99, "zip file version"),
    "patched data": (8, 0x20, "compressed patched data"),
}


@pytest.mark.parametrize("name", FLAWS)
def test_archives_of_unknown_kinds_are_refused(tmp_path, name):
    offset, value, told = FLAWS[name]
    path = tmp_path / "loads.npz"
    np.savez(path, np.ones((2, 4), dtype=int))
    content = bytearray(path.read_bytes())
    for mark, shift in ((b"PK\x01\x02", 0), (b"PK\x03\x04", -2)):
        content[content.index(mark) + offset + shift] = value
    path.write_bytes(content)
    with pytest.raises(FileError, match=told):
        workload.read_loads(path)


def test_arrays_are_read_as_numpy_wrote_them(tmp_path):
    wanted = {
        "plain": np.arange(12).reshape(3, 4),
        "columns": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "empty": np.zeros((0, 3), dtype=np.int32),
        "words": np.array(["a", "bcd"]),
        "one": np.array(7, dtype=">i2"),
    }
    np.savez_compressed(tmp_path / "all.npz", **wanted)
    found = read_arrays(tmp_path / "all.npz")
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        np.save(tmp_path / "one.npy", array)
        for read in (found[name], read_array(tmp_path / "one.npy")):
            np.testing.assert_array_equal(read, array)
            assert (read.dtype, read.shape) == (array.dtype, array.shape)
