"""Synthetic traces of any size: the pieces that the recorders of all ranks would write.

A few plans repeat, and the popular experts change now and then. Times follow from the rows of each
rank, with noise. Only one piece is in memory at a time.

Shapes: P plans, N records of a piece, R ranks, E experts, S slots of all ranks, G stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import ultraep
from ultraep import workload
from ultraep.config import BalanceConfig
from ultraep.files.writing import write_text
from ultraep.topology import Topology
from ultraep.trace.files import write_arrays
from ultraep.trace.record import PIECE_BYTES
from ultraep.trace.schema import (
    HEADER_FILE,
    STAGES,
    Arrays,
    Header,
    of_backward,
    piece_file,
    rank_folder,
)
from ultraep.trace.summary import summary_of

PHASES, VARIANTS = 6, 16  # topics, and plans per topic
PER_OTHER_PIECE = 2000  # records per piece of ranks other than 0: 4 MiB
NANOSECONDS = 40  # seconds per row, forward
BEGAN = 1.7e9


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a trace."""

    ranks: int = 64
    experts: int = 256
    layers: int = 100
    microbatches: int = 1000
    top_k: int = 8
    tokens: int = 4096

    @property
    def records(self) -> int:
        return self.layers * self.microbatches


class Drawn:
    """The plans of a trace, and the plan of every record."""

    def __init__(self, size: Size) -> None:
        self.size, self.config = size, BalanceConfig(tolerance=0.01)
        self.topology = Topology(ranks=size.ranks, experts=size.experts, slots=1)
        self.header = Header.of(self.topology, self.config, relay="auto", chunks=4, note="drawn")
        self.plans = [self._plan(number) for number in range(PHASES * VARIANTS)]

    def _plan(self, number: int) -> ultraep.Plan:
        ratio = 1.3 + 0.35 * (number // VARIANTS) + 0.04 * (number % VARIANTS)
        ratio = min(ratio, self.size.experts / self.size.top_k)  # what can be drawn
        loads = workload.zipf(
            self.size.ranks,
            self.size.experts,
            ratio=ratio,
            top_k=self.size.top_k,
            tokens=self.size.tokens,
            seed=number,
            shuffled=True,
        )
        return ultraep.plan(loads, self.topology, self.config)

    @cached_property
    def loads(self) -> NDArray[np.int32]:
        """[P, R, E]"""
        return np.stack([plan.loads for plan in self.plans]).astype(np.int32)

    @cached_property
    def rows(self) -> NDArray[np.int32]:
        """[P, S] rows per slot."""
        home_slots = self.topology.home_slot_of_expert
        rows = np.zeros((len(self.plans), self.topology.first_slot_of_rank[-1]), dtype=np.int32)
        for own, plan in zip(rows, self.plans, strict=True):
            own[home_slots] = plan.loads.sum(axis=0)
            expert, host, slot = plan.replicas.T
            np.subtract.at(own, home_slots[expert], plan.quotas.astype(np.int32))
            own[self.topology.spare_slot(host, slot)] = plan.quotas
        return rows

    def keys(self, begin: int, end: int) -> Arrays:
        """Step, layer and microbatch of these records; a step has two microbatches."""
        records = np.arange(begin, end)
        moment, layer = np.divmod(records, self.size.layers)
        return {
            "step": moment // 2,
            "layer": layer.astype(np.int32),
            "microbatch": (moment % 2).astype(np.int32),
        }

    def plan_of(self, begin: int, end: int) -> NDArray[np.int64]:
        """[N] the plan of each of these records."""
        moment, layer = np.divmod(np.arange(begin, end), self.size.layers)
        phase = (moment * PHASES // self.size.microbatches + layer // 7) % PHASES
        plan: NDArray[np.int64] = phase * VARIANTS + (moment * 5 + layer * 3) % VARIANTS
        return plan


def piece_of(drawn: Drawn, rank: int, begin: int, end: int, rng: np.random.Generator) -> Arrays:
    """The piece of a rank with these records."""
    which, topology = drawn.plan_of(begin, end), drawn.topology
    first = topology.first_slot_of_rank
    rows = drawn.rows[which, first[rank] : first[rank + 1]]
    seconds = _seconds(rows.sum(axis=1), rng)
    back = of_backward(STAGES)
    began = BEGAN + 0.01 * np.arange(begin, end) + 1e-5 * rng.random(end - begin)
    keys = drawn.keys(begin, end)
    arrays = keys | {
        "slot_rows": rows,
        "bytes_moved": rng.integers(0, 3, end - begin) * (44 << 20),
        "began": began,
        "seconds": np.where(back, 0, seconds).astype(np.float32),
        "more": np.column_stack([keys["step"], keys["layer"], keys["microbatch"]]).astype(np.int64),
        "more_bytes": np.zeros(end - begin, dtype=np.int64),
        "more_began": began + 0.004,
        "more_seconds": np.where(back, seconds, 0).astype(np.float32),
        "dropped": np.zeros(1, dtype=np.int64),
    }
    arrays |= _of_plans(drawn, which) if rank == 0 else {}
    return arrays | summary_of(drawn.header, arrays)


def _of_plans(drawn: Drawn, which: NDArray[np.int64]) -> Arrays:
    plans = [drawn.plans[number] for number in which]
    return {
        "policy": np.array([plan.config.policy for plan in plans]),
        "loads": drawn.loads[which],
        "copy_ends": np.cumsum([plan.num_replicas for plan in plans], dtype=np.int32),
        "copies": np.concatenate([plan.replicas for plan in plans]).astype(np.int32),
        "quotas": np.concatenate([plan.quotas for plan in plans]).astype(np.int32),
    }


def _seconds(rows_N: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.float64]:
    """[N, G] seconds of all stages."""
    seconds = 2e-4 * rng.random((len(rows_N), len(STAGES))).round(3)
    seconds[:, STAGES.index("experts")] += NANOSECONDS * 1e-9 * rows_N
    seconds[:, STAGES.index("experts back")] += 2 * NANOSECONDS * 1e-9 * rows_N
    return seconds


def pieces(drawn: Drawn) -> Iterator[tuple[int, int, int, int]]:
    """Rank, number, begin and end of every piece, with the sizes of a recorder."""
    size = drawn.size
    per_first = max(1, PIECE_BYTES // (4 * size.ranks * size.experts))
    for rank in range(size.ranks):
        per_piece = PER_OTHER_PIECE if rank else min(per_first, PER_OTHER_PIECE)
        for number, begin in enumerate(range(0, size.records, per_piece)):
            yield rank, number, begin, min(begin + per_piece, size.records)


def write_trace(folder: Path, size: Size) -> None:
    """Write the whole trace into a new folder."""
    drawn, rng = Drawn(size), np.random.default_rng(0)
    for rank in range(size.ranks):
        (folder / rank_folder(rank)).mkdir(parents=True)
    write_text(folder / HEADER_FILE, drawn.header.to_json() + "\n")
    for rank, number, begin, end in pieces(drawn):
        path = folder / rank_folder(rank) / piece_file(number)
        write_arrays(path, piece_of(drawn, rank, begin, end, rng))
