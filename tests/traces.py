"""Small traces for tests."""

import numpy as np

import ultraep
from ultraep import BalanceConfig, Recorder, Topology
from ultraep.reroute import rows_received

TOPOLOGY = Topology(ranks=2, experts=4, slots=1)
CONFIG = BalanceConfig()


def plan_for(seed, topology=TOPOLOGY, config=CONFIG, history=None):
    rng = np.random.default_rng(seed)
    loads = rng.integers(0, 30, (topology.ranks, topology.experts))
    loads *= rng.random(topology.experts) < 0.7
    return ultraep.plan(loads, topology, config, history=history)


def arrived(plan, rank):
    return rows_received(plan, rank).sum(axis=0)


def record(folder, plans, *, topology=TOPOLOGY, config=CONFIG, layers=1, **options):
    """Write a trace of these plans.

    ranks: number of records by rank.   bytes_moved: a function of plan and rank.
    seconds: by stage, of every record.
    """
    counts = options.pop("ranks", None) or dict.fromkeys(range(topology.ranks), len(plans))
    bytes_moved = options.pop("bytes_moved", lambda *_: 0)
    seconds = options.pop("seconds", None)
    for rank, count in counts.items():
        with Recorder(folder, topology, config, rank=rank, **options) as recorder:
            for number, plan in enumerate(plans[:count]):
                rows, (step, layer) = arrived(plan, rank), divmod(number, layers)
                sent = bytes_moved(plan, rank)
                values = {"slot_rows": rows, "bytes_moved": sent, "seconds": seconds}
                assert recorder.add(plan=plan, step=step, layer=layer, **values)
    return folder
