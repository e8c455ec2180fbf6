"""Read damaged traces, and traces built to do harm, with limited memory and time.

python tests/mutated_traces.py FOLDER 300      # damage and read 300 traces, print each outcome
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
from damage import claim_zeros, damaged
from traces import plan_for, record

from ultraep import UltraEPError, read_trace
from ultraep.tools.view.catalogue import Catalogue
from ultraep.tools.view.record import numbers_of, stages_of
from ultraep.tools.view.table import heat, overview
from ultraep.trace.files import write_arrays
from ultraep.trace.schema import SUMMARIES

MEMORY = 1 << 30  # limit in bytes
SECONDS = 10.0  # limit per trace

HEADER, FIRST, OTHER = "run/header.json", "run/rank-00000/000000.npz", "run/rank-00001/000000.npz"
OLD, SINGLE = "old/rank-00000/000000.npz", "run.npz"
FILES = (HEADER, HEADER, FIRST, FIRST, FIRST, OTHER, OLD, SINGLE)  # repeated: drawn more often
GIGABYTES = 3.9  # claimed size; below the limit of plain zip


def write_valid(folder):
    """Write a trace, the same trace without summaries (version 3), and in one file."""
    run = record(folder / "run", [plan_for(seed) for seed in range(6)], layers=2)
    shutil.copytree(run, folder / "old")
    for path in (folder / "old").rglob("*.npz"):
        with np.load(path) as stored:
            arrays = {name: stored[name] for name in stored.files if name not in SUMMARIES}
        write_arrays(path, arrays)
    read_trace(run).save(folder / SINGLE)
    return folder


def mutations(folder, seeds):
    """Yield the name and path of a damaged trace, one at a time; restore it afterwards."""
    for seed in seeds:
        rng = random.Random(seed)
        path = folder / rng.choice(FILES)
        content, inside = path.read_bytes(), path.relative_to(folder)
        path.write_bytes(damaged(content, rng))
        yield f"{inside}, seed {seed}", folder / inside.parts[0]
        path.write_bytes(content)


def change_header(folder, **changes):
    path = folder / HEADER
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def sparse_header(folder):
    with (folder / HEADER).open("ab") as file:
        file.truncate(5 << 30)


def no_pieces(folder):
    change_header(folder, ranks=1 << 12, experts=1 << 20, domain=1 << 12)
    for rank in range(2):
        shutil.rmtree(folder / f"run/rank-{rank:05d}")


def many_pieces(folder):
    """Write 30 pieces of records without rows, each below the limit."""
    with np.load(folder / OLD) as stored:
        arrays = dict(stored)
    for name, array in arrays.items():
        if name != "dropped":
            count = 0 if name in ("copies", "quotas") else 20_000
            arrays[name] = np.zeros((count, *array.shape[1:]), array.dtype)
    write_arrays(folder / OLD, arrays)
    for number in range(1, 30):
        shutil.copy(folder / OLD, (folder / OLD).with_name(f"{number:06d}.npz"))


RECORDS = int(GIGABYTES * 1e9 / 4 / 2 / 4)
LINES = int(GIGABYTES * 1e9 / 8 / 12)
HOSTILE = {  # change to the folder, trace to read, expected message of `read_trace`
    "loads of 3.9 GB": (
        lambda folder: claim_zeros(folder / FIRST, "loads", (RECORDS, 2, 4), "<i4"),
        *("run", "claim to unpack to 3,9"),
    ),
    "loads of 3.9 GB, one file": (
        lambda folder: claim_zeros(folder / SINGLE, "loads", (RECORDS, 2, 4), "<i4"),
        *(SINGLE, "claim to unpack to 3,9"),
    ),
    "a header of 2 GB, one file": (
        lambda folder: claim_zeros(folder / SINGLE, "header", (), "<U500000000"),
        *(SINGLE, "its header has 2,0"),
    ),
    "a summary of 3.9 GB": (
        lambda folder: claim_zeros(folder / FIRST, "summary", (LINES, 12), "<i8"),
        *("run", "claim to unpack to 3,9"),
    ),
    "30 pieces": (many_pieces, "old", "claim to unpack to "),
    "a header of 5 GB": (sparse_header, "run", "header.json: 5,368,709,120 bytes"),
    "65,536 ranks": (
        lambda folder: change_header(folder, ranks=1 << 16, experts=1 << 20, domain=1 << 16),
        *("run", "65,536 ranks, but a trace has at most 4,096"),
    ),
    "4,096 ranks without files": (no_pieces, "run", ""),
    "200,000 stages": (
        lambda folder: change_header(folder, stages=[str(n) for n in range(200_000)]),
        *("run", "200,000 stages, but a trace has at most 256"),
    ),
    "deep JSON": (
        lambda folder: (folder / HEADER).write_text("[" * (1 << 20)),
        *("run", "truncated or damaged"),
    ),
}


class TooSlow(BaseException):
    """Not an Exception, so that no reader catches it."""


def outcome_of_reader(path):
    """Return the error of reading a whole trace; "" if it is valid."""
    try:
        trace = read_trace(path)
        _ = trace.imbalance_before, trace.imbalance_after, trace.num_copies, trace.by_layer()
        for record_number in range(len(trace)):
            trace.plan(record_number)
    except UltraEPError as error:
        return str(error)
    return ""


def outcome_of_viewer(path):
    """Return the error or the notes of drawing a whole trace in the viewer."""
    try:
        catalogue = Catalogue([path])
    except UltraEPError as error:
        return str(error)
    try:
        catalogue.read_all()
        trace = catalogue.trace(catalogue.items[0].name)
        drawn = [overview(trace.table), heat(trace.table, "lost")]
        for key in map(trace.table.key, range(len(trace.table))):
            drawn += [numbers_of(trace.record(key)), stages_of(trace.record(key))]
        json.dumps(drawn, allow_nan=False)
    except UltraEPError as error:
        return str(error)
    finally:
        catalogue.close()
    return "; ".join(trace.notes)


def outcomes(path):
    """Yield the outcomes of reader and viewer, each within the time limit."""
    for read in (outcome_of_reader, outcome_of_viewer):
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        yield read(path)
        signal.setitimer(signal.ITIMER_REAL, 0)


def main():
    """Print a line of JSON for each trace: its name and both outcomes."""
    folder, count = Path(sys.argv[1]), int(sys.argv[2])

    def too_slow(*_):
        raise TooSlow

    signal.signal(signal.SIGALRM, too_slow)
    valid = write_valid(folder / "valid")
    list(outcomes(valid / "run"))  # imports everything before the limit
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    for name, path in mutations(valid, range(count)):
        print(json.dumps([name, *outcomes(path)]), flush=True)
    for number, (name, (spoil, inside, _)) in enumerate(HOSTILE.items()):
        other = shutil.copytree(valid, folder / f"hostile-{number}")
        spoil(other)
        print(json.dumps([name, *outcomes(other / inside)]), flush=True)
        shutil.rmtree(other)


if __name__ == "__main__":
    main()
