"""Findings of the parts of a check, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_NAMES = 8


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
    rank_0_lost: rank 0 does not print the verdict.
    """

    level: int
    findings: list[Finding] = field(default_factory=list)
    ready: str = ""
    next_command: str = "the same command again, after a repair (docs/troubleshooting.md)"
    rank_0_lost: bool = False

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


def grouped(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Return every text once, after the names that have it.

    >>> grouped([("rank 1", "no memory"), ("rank 2", "no memory"), ("rank 3", "late")])
    ['rank 1, rank 2: no memory', 'rank 3: late']
    """
    names: dict[str, list[str]] = {}
    for name, text in texts:
        names.setdefault(text, []).append(name)
    return [f"{listed(of_text)}: {text}" for text, of_text in names.items()]


def listed(names: Sequence[str]) -> str:
    """Return the names with commas; of many names only some."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
