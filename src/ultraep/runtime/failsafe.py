"""Fail-safe: `on_error="unbalanced"` turns a failure of planning into an unbalanced microbatch.

A rank that fails to plan, to measure rates, to learn speeds or to record holds its error. The next
record that it sends to all ranks anyway carries a mark: with the loads, or where ranks compare
plans. So all ranks run the same microbatch without replicas, and no message is added. Errors of
communication, and ranks that disagree, always raise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from ultraep.arrays import IntArray
from ultraep.config import AUTO, BalanceConfig
from ultraep.errors import CommunicationError, PlanMismatch
from ultraep.microbatch import MicrobatchInfo
from ultraep.plan import Plan, plan_from_replicas
from ultraep.runtime.observe import Sink
from ultraep.runtime.stats import Stats
from ultraep.topology import Topology

PLANNING, SPEEDS = 1, 2  # what has failed, as bits of a mark
STOPPING = (CommunicationError, PlanMismatch)  # errors that always raise

logger = logging.getLogger(__name__)


class FailSafe:
    """The held errors of one rank, and the microbatches that all ranks ran unbalanced.

    stats: counts them.   active: whether errors are held; otherwise they raise.
    """

    def __init__(self, rank: int, stats: Stats, *, active: bool) -> None:
        self.active, self._rank, self._stats = active, rank, stats
        self.microbatches = 0  # that ran unbalanced because of errors, in all
        self._held: list[tuple[int, Exception]] = []
        self._logged = False
        self.layers: set[int] = set()  # with such microbatches

    def holding(self, what: int = PLANNING) -> AbstractContextManager[None]:
        """Return a block whose errors are held instead of raised."""
        return _Holding(self, what)

    def hold(self, what: int, error: Exception) -> None:
        self._held.append((what, error))

    def attempt(self, what: int, function: Callable[..., int], *args: Any) -> int:
        """Return the result of a function, or 0 if it raises and the error is held."""
        with self.holding(what):
            return function(*args)
        return 0

    @property
    def mark(self) -> int:
        """Bits of the parts that failed here since the last agreement; 0: none."""
        return int(np.bitwise_or.reduce([what for what, _ in self._held] or [0]))

    def raise_held(self) -> None:
        """Raise the first held error, if any: ranks cannot agree here."""
        held, self._held = self._held, []
        if held:
            raise held[0][1]

    def agreed(self, info: MicrobatchInfo, ranks: Sequence[int]) -> None:
        """Count a microbatch that all ranks run unbalanced, because these ranks have failed."""
        self.count(f"layer {info.layer} (step {info.step}) runs unbalanced", ranks)
        self.layers.add(info.layer)

    def count(self, consequence: str, ranks: Sequence[int]) -> None:
        """Count a failure that all ranks know of; log the first one, and the first of this rank."""
        held, self._held = self._held, []
        self.microbatches += 1
        self._stats.failed += 1
        if held and not self._logged:
            self._logged = True
            logger.error("rank %d failed: %s", self._rank, consequence, exc_info=held[0][1])
        elif self.microbatches == 1:
            logger.error("%s, because of an error on ranks %s", consequence, list(ranks))


class Caught(AbstractContextManager[None]):
    """A block whose error is caught, unless it is one of `STOPPING`."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, Exception) and not isinstance(error, STOPPING):
            self.error = error
        return self.error is not None

    @property
    def text(self) -> str:
        """Type and message of the error; empty: none."""
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"

    def raise_again(self) -> None:
        """Raise the error, if there was one."""
        if self.error is not None:
            raise self.error


class _Holding(Caught):
    def __init__(self, safe: FailSafe, what: int) -> None:
        super().__init__()
        self._safe, self._what = safe, what

    def __exit__(self, *raised: Any) -> bool:
        if not self._safe.active or not super().__exit__(*raised):
            return False
        assert self.error is not None
        self._safe.hold(self._what, self.error)
        return True


class GuardedSink:
    """A sink whose first error is held; it receives nothing afterwards."""

    def __init__(self, sink: Sink, safe: FailSafe, what: int = PLANNING) -> None:
        self._sink: Sink | None = sink
        self._safe, self._what = safe, what

    def planned(self, *observed: Any) -> None:
        self._pass("planned", *observed)

    def took(self, *observed: Any) -> None:
        self._pass("took", *observed)

    def sent(self, *observed: Any) -> None:
        self._pass("sent", *observed)

    def passed(self, *observed: Any) -> None:
        self._pass("passed", *observed)

    def _pass(self, verb: str, *observed: Any) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            with self._safe.holding(self._what):
                getattr(sink, verb)(*observed)
                self._sink = sink


def unbalanced_plan(loads_RE: IntArray, topology: Topology, config: BalanceConfig) -> Plan:
    """Return the plan without replicas; it needs no planner."""
    speeds = None if config.speeds == AUTO else config.speeds
    config = replace(config, policy="none", speeds=speeds)
    return plan_from_replicas(loads_RE, topology, config, np.empty((0, 3), dtype=np.int64))
