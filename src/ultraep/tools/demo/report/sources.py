"""What a report is made of: result.json and the traces of a demo, read and checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ultraep.errors import FileError
from ultraep.tools.demo.result import RESULT_FILE, DemoResult, PolicyResult, trace_folder
from ultraep.tools.demo.sizes import Sizes
from ultraep.trace.read import Trace, read_trace

FAVOURITE = "ultraep"  # the policy that is shown in detail, if it was run
NUMBER = (int, float)
KINDS: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": NUMBER,
    "str": str,
    "list[int]": int,
    "list[float]": NUMBER,
    "list[str]": str,
}


@dataclass(frozen=True)
class Subject:
    """Steps of one kind of text, from `begin` to `end`, both included."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class Sources:
    """A finished demo."""

    result: DemoResult
    traces: dict[str, Trace]  # of the training only, by policy
    checks: dict[str, int]  # records that came after it

    @property
    def shown(self) -> str:
        """The policy that is shown in detail."""
        return FAVOURITE if FAVOURITE in self.traces else list(self.traces)[-1]

    @property
    def trace(self) -> Trace:
        """Its training."""
        return self.traces[self.shown]

    @property
    def row(self) -> PolicyResult:
        """Its result."""
        return next(row for row in self.result.policies if row.policy == self.shown)

    @cached_property
    def domains(self) -> list[Subject]:
        """In the order of the training."""
        names = self.result.domains
        begins = [step for step, name in enumerate(names) if not step or names[step - 1] != name]
        ends = [*(begin - 1 for begin in begins[1:]), len(names) - 1]
        return [Subject(names[b], b, e) for b, e in zip(begins, ends, strict=True)]


def read_sources(out: Path) -> Sources:
    """The result and all its traces; `FileError` if a part is missing or damaged."""
    result = DemoResult.load(out)
    _check(result, out / RESULT_FILE)
    traces, checks = {}, {}
    for row in result.policies:
        folder = trace_folder(out, row.policy)
        whole = read_trace(folder)
        if whole.header.ranks != result.sizes.ranks:
            raise FileError(
                f"{folder}: a trace of {whole.header.ranks} ranks, but {RESULT_FILE} tells of "
                f"{result.sizes.ranks}: they are not of one run"
            )
        training = np.flatnonzero(whole.step < result.steps)
        if not len(training):
            raise FileError(f"{folder}: the trace has no record of the training")
        traces[row.policy] = whole.take(training)
        checks[row.policy] = len(whole) - len(training)
    return Sources(result, traces, checks)


def _check(result: DemoResult, path: Path) -> None:
    """Raise `FileError` unless everything has the right type and length."""
    rows = result.policies
    parts: list[DemoResult | PolicyResult | Sizes] = [result, result.sizes, *rows]
    for part in parts:
        for name, value in _wrong(part):
            raise FileError(f"{path}: damaged: {name} is {value!r}")
    if not rows or result.steps < 1 or result.sizes.ranks < 1:
        raise FileError(f"{path}: damaged: no policies, steps or ranks")
    for row in rows:
        for name in ("losses", "seconds"):
            if len(getattr(row, name)) != result.steps:
                raise FileError(
                    f"{path}: damaged: {len(getattr(row, name))} {name} of {row.policy}, "
                    f"but {result.steps} steps"
                )
    if len(result.domains) != result.steps:
        raise FileError(f"{path}: damaged: {len(result.domains)} domains, but {result.steps} steps")


def _wrong(part: DemoResult | PolicyResult | Sizes) -> Iterator[tuple[str, Any]]:
    """Entries that are not of the type that they should be."""
    for field in fields(part):
        kind, value = KINDS.get(str(field.type)), getattr(part, field.name)
        if kind is None:  # made by a constructor of its own
            continue
        several = str(field.type).startswith("list")
        values = value if several and isinstance(value, list) else [value]
        if several != isinstance(value, list) or not all(isinstance(one, kind) for one in values):
            yield field.name, value
