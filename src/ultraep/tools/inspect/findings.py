"""Findings: the trace planned again at all EP sizes, under all policies and slots -> numbers.

Shapes: N records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ultraep.plan import Plan
from ultraep.tools.inspect.result import Row, TextSpan, text_of_step
from ultraep.trace.read import Trace
from ultraep.trace.replay import Case, Replayed, cases, plans, replayed

NONE = "none"
SHOWN = "ultraep"  # the policy that is shown in detail, if it was asked for
Tell = Callable[[int, int, str], None]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Findings:
    """The records of a trace under every case, and which text they are of."""

    trace: Trace
    texts: list[TextSpan]
    found: list[Replayed]

    @property
    def text(self) -> NDArray[np.str_]:
        """[N] the text of every record."""
        return np.array(text_of_step(self.texts, self.trace.step))

    @property
    def rows(self) -> list[Row]:
        """A row for every case."""
        return [_row(one) for one in self.found]

    @property
    def sizes(self) -> list[int]:
        """Numbers of ranks, in the order that was asked for."""
        return list(dict.fromkeys(one.case.topology.ranks for one in self.found))

    def of_size(self, ranks: int) -> list[Replayed]:
        """The cases with so many ranks."""
        return [one for one in self.found if one.case.topology.ranks == ranks]

    def shown_of(self, ranks: int) -> Replayed:
        """The case with so many ranks that is shown in detail: `SHOWN`, or the last policy."""
        own = self.of_size(ranks)
        return next((one for one in own if one.case.config.policy == SHOWN), own[-1])

    @property
    def shown(self) -> Replayed:
        """The case of the first size that is shown in detail."""
        return self.shown_of(self.sizes[0])

    @property
    def shown_label(self) -> str:
        """Its policy and slots."""
        return label(self.shown.case)

    def shown_plans(self) -> list[Plan]:
        """[N] its plans."""
        return list(plans(self.trace, self.shown.case))


def find(
    trace: Trace,
    texts: list[TextSpan],
    *,
    sizes: Sequence[int],
    slots: Sequence[int],
    policies: Sequence[str],
    history: int,
    tell: Tell,
) -> Findings:
    """Plan all records under every combination; without balancing, slots make no difference."""
    wanted = [
        case
        for size, policy in product(sizes, policies)
        for case in cases(
            trace,
            policies=[policy],
            slots=slots[:1] if policy == NONE else slots,
            ranks=[size],
            history=[history],
        )
    ]
    found = []
    for number, case in enumerate(wanted):
        tell(number, len(wanted), label(case, ranks=True))
        found.append(replayed(trace, case))
    return Findings(trace, texts, found)


def label(case: Case, *, ranks: bool = False) -> str:
    """A case in short.

    >>> from ultraep import BalanceConfig, Topology
    >>> label(Case(BalanceConfig(policy="eplb"), Topology(ranks=8, experts=8), 1), ranks=True)
    'EP8 eplb with 1 slot'
    """
    policy, slots = case.config.policy, case.topology.slots
    where = f"EP{case.topology.ranks} " if ranks else ""
    return where + (policy if policy == NONE else f"{policy} with {slots} slot{'s' * (slots != 1)}")


def past_of(findings: Findings, history: int) -> tuple[Mask, Mask]:
    """[N] records whose past is of their own text alone; those right after a change of text."""
    step, begins = findings.trace.step, {span.name: span.begin for span in findings.texts}
    behind = step - np.array([begins[name] for name in findings.text.tolist()])
    return behind >= history, (behind == 0) & (step > 0)


def _row(one: Replayed) -> Row:
    line, case = one.line, one.case
    return Row(
        policy=case.config.policy,
        ranks=case.topology.ranks,
        slots=case.topology.slots,
        history=case.history,
        before=line.before,
        before_worst=float(one.before.max()),
        after=line.after,
        after_worst=line.worst,
        bound=line.bound,
        copies=line.copies,
        remote=line.remote,
        beyond=line.beyond,
    )
