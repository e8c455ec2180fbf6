"""History: past loads of a layer, for policies that place experts by them.

A forward pass that backward recomputes (activation checkpointing) must get its first plan again. So
its loads are looked up, not added. Microbatches of a layer with equal loads that wait for backward
share their past, because a lookup could not distinguish them.

Shapes: E experts.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from ultraep.arrays import IntArray
from ultraep.microbatch import MicrobatchInfo

REMEMBERED = 64  # microbatches of a layer; more hardly wait for backward at the same time


@dataclass(eq=False, slots=True)
class Moment:
    """The position of a microbatch in the history of its layer."""

    before: IntArray  # [E] the previous loads of this layer; its own if it is the first
    number: int | None  # of the microbatch in this layer; None: recomputed, but forgotten
    key: Any = None  # under which a recorder stores the microbatch


class _Entry(NamedTuple):
    loads: IntArray  # [E]
    content: bytes  # of the loads, which are compared with each microbatch
    moment: Moment
    microbatch: weakref.ref[MicrobatchInfo]

    def waits(self) -> bool:
        """Whether backward may still recompute this microbatch."""
        microbatch = self.microbatch()
        return microbatch is not None and not microbatch.in_backward


class History:
    """The last loads of every layer."""

    def __init__(self) -> None:
        self._entries: dict[int, deque[_Entry]] = defaultdict(lambda: deque(maxlen=REMEMBERED + 1))
        self._counts: dict[int, int] = defaultdict(int)

    def note(self, microbatch: MicrobatchInfo, loads_E: IntArray) -> Moment:
        """Return the position of these loads, and remember them unless they are recomputed."""
        layer, entries = microbatch.layer, self._entries[microbatch.layer]
        content = loads_E.tobytes()
        equal = [entry for entry in reversed(entries) if entry.content == content]
        waiting = [entry for entry in equal if entry.waits()]
        if microbatch.recomputed and equal:
            return (waiting or equal)[0].moment
        before = waiting[0].moment.before if waiting else entries[-1].loads if entries else loads_E
        number = None
        if not microbatch.recomputed:
            number = self._counts[layer]
            self._counts[layer] += 1
        moment = Moment(before, number)
        entries.append(_Entry(loads_E, content, moment, weakref.ref(microbatch)))
        return moment
