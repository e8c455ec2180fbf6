"""Findings of the parts of a check, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Finding:
    """What one part of the check found.

    summary: one line.   problems: why balancing does not work here.
    warnings: what makes it slow, for the verdict.   notes: worth knowing.
    facts: everything that was measured, for the JSON file.   table: headers and rows, to print.
    """

    part: str
    summary: str = ""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    table: list[list[str]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Report:
    """All findings, and what a verdict says if no part found a problem.

    ready: the end of the line "Ready: ...".   next_command: what to run then.
    """

    level: int
    findings: list[Finding] = field(default_factory=list)
    ready: str = ""
    next_command: str = ""

    @property
    def problems(self) -> list[str]:
        return [text for finding in self.findings for text in finding.problems]

    @property
    def verdict(self) -> str:
        if self.problems:
            more = len(self.problems) - 1
            return f"Not ready: {self.problems[0]}{f' (and {more} more)' if more else ''}"
        warnings = [text for finding in self.findings for text in finding.warnings]
        return f"Ready: {'; '.join([self.ready, *warnings])}"


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def listed_by_rank(texts: Sequence[str]) -> list[str]:
    """Return the texts of the ranks, equal ones once; "" means that a rank has none.

    >>> listed_by_rank(["", "no memory", "no memory", "late"])
    ['ranks 1, 2: no memory', 'rank 3: late']
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text:
            ranks.setdefault(text, []).append(rank)
    return [f"{named(of_text)}: {text}" for text, of_text in ranks.items()]


def named(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 3, 5"; of many ranks only some."""
    shown = ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
