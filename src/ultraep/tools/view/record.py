"""One record: everything about one microbatch of one layer, from the pieces that hold it.

Shapes: R ranks, E experts, S slots of all ranks, C copies, G stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ultraep.arrays import IntArray
from ultraep.config import PER_SECOND, Rates
from ultraep.errors import FileError
from ultraep.hops import hops
from ultraep.plan import Plan
from ultraep.tools.report.numbers import FloatArray, Numbers, plain
from ultraep.tools.view.folder import FolderIndex
from ultraep.trace.read import Routed, Trace, imbalance, rates_of
from ultraep.trace.schema import ENDS, Array, Arrays, Header, of_backward

PLANNED = ("policy", "loads", ENDS, "copies", "quotas", "rates")
ROUTED = ("layer", "loads", "rates")
TOLD, LATE = ("slot_rows", "bytes_moved"), ("more_bytes",)
TIMES, LATE_TIMES = ("began", "seconds", "waited"), ("more_began", "more_seconds", "more_waited")
CHUNKS = 4  # of a chain, as balancers have it unless told otherwise
DIGITS = 7


@dataclass(frozen=True, eq=False)
class OneRecord:
    """What was routed, planned and served."""

    header: Header
    policy: str
    rates: Rates | None
    loads: IntArray  # [R, E]
    copies: IntArray  # [C, 3] expert, host, spare slot
    quotas: IntArray  # [C]
    slot_rows: IntArray  # [S]
    bytes_moved: IntArray  # [R]


@dataclass(frozen=True, eq=False)
class Times:
    """When the stages of all ranks were."""

    header: Header
    began: FloatArray  # [R, 2] forward and backward; NaN: it did not
    seconds: FloatArray  # [R, G]
    waited: FloatArray  # [R, G]


def record_of_trace(trace: Trace, record: int) -> OneRecord:
    """A record of a trace that is in memory."""
    begin = int(trace.copy_ends[record - 1]) if record else 0
    end = int(trace.copy_ends[record])
    return OneRecord(
        trace.header,
        str(trace.policy[record]),
        rates_of(trace.rates[record]),
        trace.loads[record].astype(np.int64),
        trace.copies[begin:end].astype(np.int64),
        trace.quotas[begin:end].astype(np.int64),
        trace.slot_rows[record].astype(np.int64),
        trace.bytes_moved[record],
    )


def times_of_trace(trace: Trace, record: int) -> Times:
    """Stages of a record of a trace that is in memory."""
    return Times(
        trace.header,
        np.column_stack([trace.began[record], trace.back_began[record]]),
        trace.seconds[record].astype(np.float64),
        trace.waited[record].astype(np.float64),
    )


def record_of_pieces(index: FolderIndex, place: int) -> OneRecord:
    """A record of a trace in a folder, from the pieces of all ranks."""
    header, arrays, row = index.header, *_planned(index, place, PLANNED)
    begin, end = (int(arrays[ENDS][n]) if n >= 0 else 0 for n in (row - 1, row))
    own = [_told(index, rank, place, TOLD, LATE) for rank in range(header.ranks)]
    moved = [
        int(told["bytes_moved"]) + sum(int(one["more_bytes"]) for one in late) for told, late in own
    ]
    return OneRecord(
        header,
        str(arrays["policy"][row]),
        rates_of(arrays["rates"][row]),
        arrays["loads"][row].astype(np.int64),
        arrays["copies"][begin:end].astype(np.int64),
        arrays["quotas"][begin:end].astype(np.int64),
        np.concatenate([told["slot_rows"] for told, _ in own]).astype(np.int64),
        np.array(moved),
    )


def times_of_pieces(index: FolderIndex, place: int) -> Times:
    """Its stages on all ranks."""
    own = [_told(index, rank, place, TIMES, LATE_TIMES) for rank in range(index.header.ranks)]
    began = [
        (told["began"], min((one["more_began"] for one in late), default=np.nan))
        for told, late in own
    ]
    seconds, waited = (
        np.stack(
            [
                sum((one[f"more_{name}"] for one in late), told[name].astype(np.float64))
                for told, late in own
            ]
        )
        for name in ("seconds", "waited")
    )
    return Times(index.header, np.array(began), seconds, waited)


def routed_of_pieces(index: FolderIndex, place: int) -> Routed:
    """What was routed in a record, and the rates that it was planned by."""
    arrays, row = _planned(index, place, ROUTED)
    layer, loads, rates = (arrays[name][row] for name in ROUTED)
    return Routed(int(layer), loads.astype(np.int64), rates_of(rates))


def _planned(index: FolderIndex, place: int, names: tuple[str, ...]) -> tuple[Arrays, int]:
    """Arrays of the piece of rank 0 that holds the plan of a record, and the row there."""
    line = next(line for line in index.ranks[0].lines_of(place) if not line.late)
    path = index.path(0, line.piece)
    arrays = index.store.arrays(path, index.header, 0, names)
    if line.line >= len(arrays["loads"]):
        raise FileError(
            f"{path}: row {line.line} of {len(arrays['loads'])}: the summary does not fit"
        )
    return arrays, line.line


def _told(
    index: FolderIndex, rank: int, place: int, names: tuple[str, ...], late: tuple[str, ...]
) -> tuple[Arrays, list[Arrays]]:
    """What one rank tells of a record, and what it told late."""
    told: Arrays = {}
    more: list[Arrays] = []
    for line in index.ranks[rank].lines_of(place):
        path = index.path(rank, line.piece)
        additions = index.store.additions(path, index.header, rank, line.line)
        wanted = [dict.fromkeys(names, line.line)] * (not line.late)
        wanted += [dict.fromkeys(late, row) for row in additions]
        rows = index.store.rows(path, index.header, rank, wanted)
        told = told if line.late else rows[0]
        more += rows if line.late else rows[1:]
    return told, more


# -- as the page has it --------------------------------------------------------------------------


def numbers_of(record: OneRecord) -> Numbers:
    """All that the page draws; `loads`, `rows` and `held` as in the reports."""
    header, topology = record.header, record.header.topology
    inside = _inside(record)
    copies, quotas = record.copies[inside], record.quotas[inside]
    held = np.full((header.ranks, header.slots), -1)
    in_slots = copies[:, 2] < header.slots  # policies beyond the limits may hold more
    held[copies[in_slots, 1], copies[in_slots, 2]] = copies[in_slots, 0]
    before, after = _rank_loads(record)
    return {
        "policy": record.policy,
        "ranks": header.ranks,
        "homes": [topology.home_experts(rank).tolist() for rank in range(header.ranks)],
        "slots": header.slots,
        "loads": record.loads.sum(axis=0).tolist(),
        "rows": record.slot_rows.tolist(),
        "held": held.reshape(-1).tolist(),
        "before": plain(imbalance(before[None]))[0],
        "after": plain(imbalance(after[None]))[0],
        "rank_loads": {"before": before.tolist(), "after": after.tolist()},
        "bytes": record.bytes_moved.tolist(),
        "copies": _copies(record, copies, quotas),
        "priced": _priced(record, copies, before, after),
        "unusable": int((~inside).sum()),
    }


def _inside(record: OneRecord) -> Array:
    """[C] whether expert and host of a copy exist: a file may claim anything."""
    header, (expert, host, slot) = record.header, record.copies.T
    found: Array = (expert >= 0) & (expert < header.experts) & (host >= 0) & (host < header.ranks)
    found &= slot >= 0
    return found


def _rank_loads(record: OneRecord) -> tuple[IntArray, IntArray]:
    """[R] rows as routed, and as they arrived."""
    topology, ranks = record.header.topology, record.header.ranks
    loads = record.loads.sum(axis=0)
    before = np.bincount(topology.home_of_expert, loads, minlength=ranks).astype(np.int64)
    first = topology.first_slot_of_rank
    upto = np.concatenate([[0], np.cumsum(record.slot_rows)])
    return before, np.diff(upto[first])


def _priced(
    record: OneRecord, copies: IntArray, before: IntArray, after: IntArray
) -> Numbers | None:
    """Seconds that the rates say it takes, and would take without copies; None: no rates."""
    rates, homes = record.rates, record.header.topology.home_of_expert
    if rates is None or record.header.objective != "time":
        return None
    taken, given = np.bincount(copies[:, 1]), np.bincount(homes[np.unique(copies[:, 0])])
    transfers = int(max(taken.max(initial=0), given.max(initial=0)))
    planned = rates.time(peak=int(after.max()), transfers=transfers, copies=len(copies))
    without = rates.time(peak=int(before.max()), transfers=0, copies=0)
    return {"rates": str(rates), "time": planned / PER_SECOND, "without": without / PER_SECOND}


def _copies(record: OneRecord, copies: IntArray, quotas: IntArray) -> Numbers:
    """Every copy with its way from home.

    relay: "direct" or "chain".   told: whether the balancer was told so, and not left to choose,
    by a rule that is applied here ("auto"); "": nobody tells, and the rule is applied.
    """
    header, none = record.header, np.zeros(0, dtype=np.int64)
    plan = Plan(header.topology, header.config, record.loads, copies, quotas, none, none)
    found = hops(plan, header.relay or "auto", chunks=header.chunks or CHUNKS)
    way: dict[tuple[int, int], list[int]] = {}
    for hop in found:
        before = way.get((hop.expert, hop.sender), [hop.sender])
        way[hop.expert, hop.receiver] = [*before, hop.receiver]
    tokens = {(int(c[0]), int(c[1])): int(q) for c, q in zip(copies, quotas, strict=True)}
    return {
        "relay": "chain" if any(hop.depth for hop in found) else "direct",
        "told": header.relay,
        "list": [
            {
                "expert": hop.expert,
                "host": hop.receiver,
                "slot": hop.slot,
                "tokens": tokens[hop.expert, hop.receiver],
                "way": way[hop.expert, hop.receiver],
            }
            for hop in found
        ],
    }


def stages_of(times: Times, *, backward: bool) -> Numbers | None:
    """One pass: when the stages of all ranks begin, how long they take and wait. None: no times."""
    back_G = of_backward(times.header.stages)
    own_G = back_G if backward else ~back_G
    began, seconds = times.began[:, int(backward)], times.seconds[:, own_G]
    if np.isnan(began).all() or not seconds.any():
        return None
    with np.errstate(invalid="ignore"):  # a file may claim anything
        begin = (began - np.nanmin(began))[:, None] + np.cumsum(seconds, axis=1) - seconds
    return {
        "name": "backward" if backward else "forward",
        "stages": [stage for stage, own in zip(times.header.stages, own_G, strict=True) if own],
        "begin": [_short(row) for row in begin],
        "seconds": [_short(row) for row in seconds],
        "waited": [_short(row) for row in times.waited[:, own_G]],
    }


def _short(values: FloatArray) -> list[float | None]:
    """Seconds, to a tenth of a microsecond."""
    found = values.tolist()
    return [round(value, DIGITS) if math.isfinite(value) else None for value in found]
