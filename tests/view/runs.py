"""Small traces to view, with times and bytes, and servers that show them."""

import shutil
import threading
from contextlib import contextmanager

import numpy as np
from traces import arrived

import ultraep
from ultraep import BalanceConfig, Recorder, Topology
from ultraep.trace.files import write_arrays
from ultraep.trace.schema import BACKWARD, FORWARD
from ultraep_tools.view.catalogue import Catalogue
from ultraep_tools.view.server import ViewServer

TOPOLOGY = Topology(ranks=4, experts=12, slots=1)
CONFIG = BalanceConfig()
LAYERS, MOMENTS = 3, 10


def plans_of_run(moments=MOMENTS, layers=LAYERS):
    rng = np.random.default_rng(7)
    plans = {}
    for moment in range(moments):
        for layer in range(layers):
            loads = rng.integers(0, 30, (TOPOLOGY.ranks, TOPOLOGY.experts))
            loads[:, (moment + 5 * layer) % TOPOLOGY.experts] += 90
            plans[moment, layer] = ultraep.plan(loads, TOPOLOGY, CONFIG)
    return plans


def write_piece(folder, rank, number, *, records=(), additions=()):
    """Write a piece of a rank with records, and with backward passes of records.

    Each pass also has a stage of the other pass.
    """
    rng = np.random.default_rng([rank, number])
    own, temporary = folder / f"rank-{rank:05d}", folder.with_name("temporary")

    def measured(stages):
        seconds = dict(zip(stages, rng.random(len(stages)) * 1e-3, strict=True))
        return {"seconds": seconds, "bytes_moved": int(rng.integers(0, 1000))}

    with Recorder(temporary, TOPOLOGY, CONFIG, rank=rank) as recorder:
        for (moment, layer), plan in records:
            key = {"step": moment // 2, "layer": layer, "microbatch": moment % 2}
            rows = arrived(plan, rank)
            recorder.add(plan=plan, slot_rows=rows, **key, **measured((*FORWARD, "reduce")))
        for (moment, layer), _ in additions:
            key = {"step": moment // 2, "layer": layer, "microbatch": moment % 2}
            recorder.more(**key, **measured((*BACKWARD, "experts")))
    own.mkdir(parents=True, exist_ok=True)
    path = (temporary / own.name / "000000.npz").rename(own / f"{number:06d}.npz")
    if rank == 0:
        (temporary / "header.json").rename(folder / "header.json")
    shutil.rmtree(temporary)
    return path


def write_run(folder, *, moments=MOMENTS, ranks=range(TOPOLOGY.ranks)):
    plans = plans_of_run(moments).items()
    for rank in ranks:
        write_piece(folder, rank, 0, records=plans, additions=plans)
    return folder


def write_pieces(folder, *, odd=False):
    """Write a trace in pieces of four records; odd: rank r has r more."""
    plans = list(plans_of_run().items())
    for rank in range(TOPOLOGY.ranks):
        size = 4 + (rank if odd else 0)
        for number, begin in enumerate(range(0, len(plans), size)):
            own = plans[begin : begin + size]
            write_piece(folder, rank, number, records=own, additions=own)
    return folder


def change(path, **changes):
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    write_arrays(path, arrays | changes)


@contextmanager
def served(*paths):
    server = ViewServer(Catalogue(list(paths)), 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(30)
        assert not thread.is_alive()
