"""Small traces to view, with times and bytes, and servers that show them."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import numpy as np
from traces import arrived

import ultraep
from ultraep import BalanceConfig, Recorder, Topology
from ultraep.files.writing import write_text
from ultraep.tools.view.catalogue import Catalogue
from ultraep.tools.view.server import ViewServer
from ultraep.trace.files import read_header, write_arrays
from ultraep.trace.read import _read_rank
from ultraep.trace.schema import BACKWARD, FORWARD, SUMMARIES, fields_in_pieces
from ultraep.trace.summary import summary_of

TOPOLOGY = Topology(ranks=4, experts=12, slots=1)
CONFIG = BalanceConfig()
LAYERS, MOMENTS = 3, 10


def plans_of_run(moments=MOMENTS, layers=LAYERS):
    """Return plans by moment and layer."""
    rng = np.random.default_rng(7)
    plans = {}
    for moment in range(moments):
        for layer in range(layers):
            loads = rng.integers(0, 30, (TOPOLOGY.ranks, TOPOLOGY.experts))
            loads[:, (moment + 5 * layer) % TOPOLOGY.experts] += 90
            plans[moment, layer] = ultraep.plan(loads, TOPOLOGY, CONFIG)
    return plans


def write_run(folder, *, moments=MOMENTS, ranks=range(TOPOLOGY.ranks), parts=1):
    """Write a trace; each pass also has times of a stage of the other pass.

    ranks: the ranks that write.   parts: additions of the backward pass per record.
    """
    plans = plans_of_run(moments)
    for rank in ranks:
        rng = np.random.default_rng(rank)
        with Recorder(folder, TOPOLOGY, CONFIG, rank=rank) as recorder:
            for (moment, layer), plan in plans.items():
                key = {"step": moment // 2, "layer": layer, "microbatch": moment % 2}
                moved = int(rng.integers(0, 1000))
                rows, seconds = arrived(plan, rank), drawn_seconds(rng, (*FORWARD, "reduce"))
                recorder.add(plan=plan, slot_rows=rows, bytes_moved=moved, seconds=seconds, **key)
                for _ in range(parts):
                    seconds = drawn_seconds(rng, (*BACKWARD, "experts"))
                    recorder.more(seconds=seconds, bytes_moved=moved, **key)
    return folder


def drawn_seconds(rng, stages):
    return dict(zip(stages, rng.random(len(stages)) * 1e-3, strict=True))


def write_pieces(folder, *, per_piece=4, odd=False, version=4):
    """The same trace in pieces of a few records.

    odd: every rank has its own number of records per piece.
    version: of the pieces; before 4 they had no summary.
    """
    whole = write_run(folder.with_name(folder.name + "-whole"))
    header = read_header(whole)
    folder.mkdir()
    write_text(folder / "header.json", header.to_json())
    for rank in range(header.ranks):
        own = folder / f"rank-{rank:05d}"
        own.mkdir()
        arrays = _read_rank(whole / own.name, header, rank)
        size = per_piece + (rank if odd else 0)
        for number, begin in enumerate(range(0, len(arrays["step"]), size)):
            piece = _rows(arrays, rank, begin, begin + size)
            if version > 3:
                piece |= summary_of(header, piece)
            write_arrays(own / f"{number:06d}.npz", piece)
    return folder


def _rows(arrays, rank, begin, end):
    """Some records of a rank, with their additions and replicas."""
    fields = fields_in_pieces(rank)
    piece = {n: a[begin:end] for n, a in arrays.items() if fields[n].shape[0] in "NM"}
    piece["dropped"] = arrays["dropped"]
    if rank == 0:
        ends = np.concatenate([[0], arrays["copy_ends"]])
        first, last = ends[begin], ends[min(end, len(ends) - 1)]
        piece["copy_ends"] = (piece["copy_ends"] - first).astype(np.int32)
        piece |= {name: arrays[name][first:last] for name in ("copies", "quotas")}
    return piece


def change(path, **changes):
    """Change arrays of a piece; its summary goes, which would not fit."""
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files if name not in SUMMARIES}
    write_arrays(path, arrays | changes)


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@contextmanager
def served(*paths, live=False, host="127.0.0.1", finished=True):
    """A server of these paths, in a thread."""
    server = ViewServer(Catalogue(list(paths), live=live), host, 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        if finished:
            items = server.catalogue.items
            wait_for(lambda: all(item.trace is None or item.trace.finished for item in items))
        yield server
    finally:
        server.shutdown()
        thread.join(30)
        assert not thread.is_alive()
