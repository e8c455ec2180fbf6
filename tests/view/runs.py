"""Small traces to view, with times and bytes, and servers that show them."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import numpy as np
from traces import arrived

import ultraep
from ultraep import BalanceConfig, Recorder, Topology
from ultraep.trace.schema import BACKWARD, FORWARD

TOPOLOGY = Topology(ranks=4, experts=12, slots=1)
CONFIG = BalanceConfig()
LAYERS, MOMENTS = 3, 10


def plans_of_run(moments=MOMENTS, layers=LAYERS):
    """By moment and layer."""
    rng = np.random.default_rng(7)
    found = {}
    for moment in range(moments):
        for layer in range(layers):
            loads = rng.integers(0, 30, (TOPOLOGY.ranks, TOPOLOGY.experts))
            loads[:, (moment + 5 * layer) % TOPOLOGY.experts] += 90
            found[moment, layer] = ultraep.plan(loads, TOPOLOGY, CONFIG)
    return found


def key_of(moment, layer):
    return {"step": moment // 2, "layer": layer, "microbatch": moment % 2}


def add(recorder, plan, key, rank, rng):
    """A record of one rank, forward and backward."""
    seconds = dict(zip(FORWARD, rng.random(len(FORWARD)) * 1e-3, strict=True))
    backward = dict(zip(BACKWARD, rng.random(len(BACKWARD)) * 1e-3, strict=True))
    moved = int(rng.integers(0, 1000))
    rows = arrived(plan, rank)
    assert recorder.add(plan=plan, slot_rows=rows, bytes_moved=moved, seconds=seconds, **key)
    assert recorder.more(seconds=backward, bytes_moved=moved, **key)


def write_run(folder, *, moments=MOMENTS, layers=LAYERS, ranks=None):
    """A whole trace; `ranks`: those that write."""
    plans = plans_of_run(moments, layers)
    for rank in range(TOPOLOGY.ranks) if ranks is None else ranks:
        rng = np.random.default_rng(rank)
        with Recorder(folder, TOPOLOGY, CONFIG, rank=rank) as recorder:
            for (moment, layer), plan in plans.items():
                add(recorder, plan, key_of(moment, layer), rank, rng)
    return folder


def write_pieces(folder, *, moments=MOMENTS, layers=LAYERS, per_piece=4, odd=False, version=4):
    """The same in pieces as small as these; odd: every rank has pieces of its own size.

    version: that of the pieces; before 4 they had no summary.
    """
    from ultraep.files.writing import write_text
    from ultraep.trace.files import write_arrays
    from ultraep.trace.read import read_trace
    from ultraep.trace.schema import fields_in_pieces
    from ultraep.trace.summary import summary_of

    whole = folder.with_name(folder.name + "-whole")
    write_run(whole, moments=moments, layers=layers)
    header = read_trace(whole).header
    folder.mkdir()
    write_text(folder / "header.json", header.to_json())
    for rank in range(header.ranks):
        own = folder / f"rank-{rank:05d}"
        own.mkdir()
        arrays = _whole_rank(whole, rank)
        size = per_piece + (rank if odd else 0)
        for number, begin in enumerate(range(0, len(arrays["step"]), size)):
            rows = slice(begin, begin + size)
            fields = fields_in_pieces(rank)
            piece = {
                n: arrays[n][rows] for n, f in fields.items() if f.shape[0] in "NM" and n in arrays
            }
            piece["dropped"] = arrays["dropped"]
            if rank == 0:
                ends = np.concatenate([[0], arrays["copy_ends"]])
                first, last = ends[begin], ends[min(begin + size, len(ends) - 1)]
                piece["copy_ends"] = (piece["copy_ends"] - first).astype(np.int32)
                piece |= {name: arrays[name][first:last] for name in ("copies", "quotas")}
            if version > 3:
                piece |= summary_of(header, piece)
            write_arrays(own / f"{number:06d}.npz", piece)
    return folder


def _whole_rank(folder, rank):
    """All arrays of a rank; what is told late is in the order of the records."""
    from ultraep.trace.read import _read_rank, read_trace

    return _read_rank(folder / f"rank-{rank:05d}", read_trace(folder).header, rank)


def change(path, **changes):
    """Change arrays of a piece; None removes one. Its summary goes: it would not fit."""
    from ultraep.trace.files import write_arrays
    from ultraep.trace.schema import SUMMARIES

    with np.load(path) as found:
        arrays = {name: found[name] for name in found.files if name not in SUMMARIES} | changes
    write_arrays(path, {name: array for name, array in arrays.items() if array is not None})


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@contextmanager
def served(*paths, live=False, host="127.0.0.1", finished=True):
    """A server of these paths, in a thread."""
    from ultraep.tools.view.catalogue import Catalogue
    from ultraep.tools.view.server import open_server

    server = open_server(Catalogue(list(paths), live=live), host=host)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.server.started)
        if finished:
            shown = server.catalogue.shown
            wait_for(lambda: all(one.trace is None or one.trace.finished for one in shown))
        yield server
    finally:
        server.server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
