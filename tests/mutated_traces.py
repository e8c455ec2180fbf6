"""Mutated and hostile traces: files that were damaged, and files that were made to do harm.

    python tests/mutated_traces.py FOLDER 300      # reads so many, prints what became of each

All are read in one process, which may take little memory, and each in little time.
"""

from __future__ import annotations

import io
import json
import random
import resource
import shutil
import signal
import struct
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
from damage import damaged
from traces import plan_for, record

from ultraep import UltraEPError, read_trace
from ultraep.tools.view.catalogue import Catalogue
from ultraep.tools.view.record import numbers_of, stages_of
from ultraep.tools.view.table import heat, overview
from ultraep.trace.files import write_arrays
from ultraep.trace.schema import SUMMARIES

MEMORY = 1 << 30  # bytes that reading may take
SECONDS = 10.0  # that one trace may take

HEADER, FIRST, OTHER = "run/header.json", "run/rank-00000/000000.npz", "run/rank-00001/000000.npz"
OLD, SINGLE = "old/rank-00000/000000.npz", "run.npz"
FILES = (HEADER, HEADER, FIRST, FIRST, FIRST, OTHER, OLD, SINGLE)  # as often as they are drawn
GIGABYTES = 3.9  # that a few megabytes claim to hold; zip needs no extension for so many


def write_sound(folder):
    """A trace of this version, the same without summaries (version 3), and in one file."""
    run = record(folder / "run", [plan_for(seed) for seed in range(6)], layers=2)
    shutil.copytree(run, folder / "old")
    for path in (folder / "old").rglob("*.npz"):
        with np.load(path) as found:
            arrays = {name: found[name] for name in found.files if name not in SUMMARIES}
        write_arrays(path, arrays)
    read_trace(run).save(folder / SINGLE)
    return folder


def mutations(folder, seeds):
    """What is mutated, and where: every file stays so until the next is drawn."""
    for seed in seeds:
        rng = random.Random(seed)
        path = folder / rng.choice(FILES)
        sound = path.read_bytes()
        path.write_bytes(damaged(sound, rng))
        yield f"{path.relative_to(folder)}, seed {seed}", named(folder, path)
        path.write_bytes(sound)


def named(folder, path):
    """The trace that a file belongs to, as users name it."""
    return path if path.parent == folder else folder / path.relative_to(folder).parts[0]


# -- made to do harm -----------------------------------------------------------------------------


def claiming(path, name, shape, dtype="<i4"):
    """In place of one array of an archive, one of zeros that is small when packed."""
    with zipfile.ZipFile(path) as archive:
        members = {one: archive.read(one) for one in archive.namelist()}
    head = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, header)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    packed = _packed_zeros(head.getvalue(), size)
    members[f"{name}.npy"] = packed
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for other, content in members.items():
            archive.writestr(other, content)
    content = bytearray(made.getvalue())
    for mark, method, sizes in ((b"PK\x03\x04", 8, 18), (b"PK\x01\x02", 10, 20)):
        begin = 0
        while (begin := content.find(mark, begin)) >= 0:
            if struct.unpack_from("<I", content, begin + sizes)[0] == len(packed):
                struct.pack_into("<H", content, begin + method, zipfile.ZIP_DEFLATED)
                struct.pack_into("<I", content, begin + sizes + 4, len(head.getvalue()) + size)
            begin += 4
    path.write_bytes(content)


def _packed_zeros(head, size):
    """A deflate stream of `head` and so many zeros, of blocks that are packed once."""
    packer, block = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS), bytes(1 << 20)
    begin = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    one = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    whole, rest = divmod(size, len(block))
    return begin + one * whole + packer.compress(bytes(rest)) + packer.flush()


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
    """Each small enough by itself, of records without rows."""
    with np.load(folder / OLD) as found:
        arrays = {name: found[name][:1] for name in found.files if name not in ("copies", "quotas")}
        arrays |= {name: found[name][:0] for name in ("copies", "quotas")}
    count = 20_000
    dropped = arrays.pop("dropped")
    records = {
        name: np.zeros((count * (name not in ("copies", "quotas")), *one.shape[1:]), one.dtype)
        for name, one in arrays.items()
    }
    write_arrays(folder / OLD, records | {"dropped": dropped})
    for number in range(1, 30):
        shutil.copy(folder / OLD, (folder / OLD).with_name(f"{number:06d}.npz"))


RECORDS = int(GIGABYTES * 1e9 / 4 / 2 / 4)
LINES = int(GIGABYTES * 1e9 / 8 / 12)
HOSTILE = {  # what is done to the folder, the trace, and what `read_trace` says
    "loads of 3.9 GB": (
        lambda folder: claiming(folder / FIRST, "loads", (RECORDS, 2, 4)),
        *("run", "that claim to unpack to 3,9"),
    ),
    "loads of 3.9 GB, one file": (
        lambda folder: claiming(folder / SINGLE, "loads", (RECORDS, 2, 4)),
        *(SINGLE, "that claim to unpack to 3,9"),
    ),
    "a header of 2 GB, one file": (
        lambda folder: claiming(folder / SINGLE, "header", (), "<U500000000"),
        *(SINGLE, "a header of 2,0"),
    ),
    "a summary of 3.9 GB": (
        lambda folder: claiming(folder / FIRST, "summary", (LINES, 12), "<i8"),
        *("run", "that claim to unpack to 3,9"),
    ),
    "times of 3.9 GB": (
        lambda folder: claiming(folder / OTHER, "seconds", (LINES * 12 // 7, 14), "<f4"),
        *("run", "that claim to unpack to 3,9"),
    ),
    "30 pieces": (many_pieces, "old", "that claim to unpack to "),
    "a header of 5 GB": (sparse_header, "run", "header.json: 5,368,709,120 bytes"),
    "65,536 ranks": (
        lambda folder: change_header(folder, ranks=1 << 16, experts=1 << 20, domain=1 << 16),
        *("run", "65,536 ranks, a trace has at most 4,096"),
    ),
    "4,096 ranks without files": (no_pieces, "run", ""),
    "200,000 stages": (
        lambda folder: change_header(folder, stages=[str(n) for n in range(200_000)]),
        *("run", "200,000 stages, a trace has at most 256"),
    ),
    "deep JSON": (
        lambda folder: (folder / HEADER).write_text("[" * (1 << 20)),
        *("run", "truncated or damaged"),
    ),
}


# -- reading them --------------------------------------------------------------------------------


class TooSlow(BaseException):
    """Not an Exception: nobody takes it for damage."""


def outcome_of_reader(path):
    """What `read_trace` says of a trace, having looked at all of it; "" if it is fine."""
    try:
        trace = read_trace(path)
        _ = trace.imbalance_before, trace.imbalance_after, trace.num_copies, trace.by_layer()
        for record_number in range(len(trace)):
            trace.plan(record_number)
    except UltraEPError as error:
        return str(error)
    return ""


def outcome_of_viewer(path):
    """What the viewer says of a trace, having drawn all of it."""
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
    """Of both, each within its time."""
    for read in (outcome_of_reader, outcome_of_viewer):
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        yield read(path)
        signal.setitimer(signal.ITIMER_REAL, 0)


def main():
    """Print a line of JSON for each trace: what it is, and what is said of it."""
    folder, count = Path(sys.argv[1]), int(sys.argv[2])

    def too_slow(*_):
        raise TooSlow

    signal.signal(signal.SIGALRM, too_slow)
    sound = write_sound(folder / "sound")
    list(outcomes(sound / "run"))  # all modules are imported by now
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    for name, path in mutations(sound, range(count)):
        print(json.dumps([name, *outcomes(path)]), flush=True)
    for number, (name, (spoil, inside, _)) in enumerate(HOSTILE.items()):
        other = shutil.copytree(sound, folder / f"hostile-{number}")
        spoil(other)
        print(json.dumps([name, *outcomes(other / inside)]), flush=True)
        shutil.rmtree(other)


if __name__ == "__main__":
    main()
