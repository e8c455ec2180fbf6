"""Output for any terminal and any file name: text, tables, progress bars, error lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ultraep.topology import Topology
from ultraep_tools.report.words import counted

WIDEST = 10_000  # columns; wide enough for any table
FAINT = "dim"
PROGRESS_LINES = 10  # printed without a terminal


def plain(text: str) -> str:
    r"""Escape control characters: a file name must not reach the terminal as a command.

    >>> plain("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def print_error(message: object) -> None:
    """Print one line on stderr."""
    if sys.stderr is not None:
        print(f"ultraep: {plain(' '.join(str(message).split()))}", file=sys.stderr)


class Terminal(Console):
    """A console that prints text literally, with control characters escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else plain(text), style, control)

    def print_facts(self, **facts: object) -> None:
        for name, text in facts.items():
            self.print(Text(f"{name:<9} {text}"), soft_wrap=True)

    def print_notes(self, *notes: str) -> None:
        for note in notes:
            self.print(Text(f"note: {note}", FAINT), soft_wrap=True)

    def print_faint(self, text: str) -> None:
        self.print(Text(text, FAINT))

    def print_table(
        self, headers: Sequence[str], rows: Iterable[Sequence[str]], heading: str = ""
    ) -> None:
        """Print a table with names in the first column and numbers in all others."""
        self.print(make_grid(headers, rows, heading))


# -- tables --------------------------------------------------------------------------------------


class Grid(Table):
    """A table that becomes one paragraph per row where the terminal is too narrow."""

    heading = ""  # unlike a title, not wrapped to the width of the table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.heading:
            yield Text(self.heading)
        unbounded = options.update(max_width=WIDEST)
        if self.__rich_measure__(console, unbounded).minimum <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        names = [" ".join(str(column.header).split()) for column in self.columns]
        width = max(map(len, names[1:]), default=0)
        for first, *cells in zip(*(column.cells for column in self.columns), strict=True):
            yield _text(first)
            for name, cell in zip(names[1:], cells, strict=True):
                yield Text.assemble("  ", f"{name:<{width}} ".lstrip(), _text(cell))


def _text(cell: Any) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def make_grid(
    headers: Sequence[str],
    rows: Iterable[Sequence[str | Text]] = (),
    heading: str = "",
    *,
    padding: int = 1,
) -> Grid:
    """Return a table with names in the first column and numbers in all others."""
    grid = Grid(box=box.SIMPLE_HEAD, padding=(0, padding, 0, 0), pad_edge=False, show_edge=False)
    grid.heading = heading
    for index, header in enumerate(headers):
        justify = "right" if index else "left"
        grid.add_column(header, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        grid.add_row(*row)
    return grid


def describe_topology(topology: Topology) -> list[str]:
    parts = [
        counted(topology.ranks, "rank"),
        counted(topology.experts, "expert"),
        f"{counted(topology.slots, 'spare slot')} each",
    ]
    if topology.num_domains > 1:
        parts.append(f"domains of {counted(topology.domain_size, 'rank')}")
    return parts


# -- progress ------------------------------------------------------------------------------------


@contextmanager
def progress(title: str, *, lines: bool = True) -> Iterator[Callable[..., None]]:
    """Yield a function of work done, all work and a description that moves a bar on stderr.

    lines: print a line from time to time if stderr is not a terminal.
    """
    stderr = Terminal(stderr=True)
    columns = (
        *(TextColumn(f"{title:<9}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()),
        TextColumn("{task.description}", markup=False),
    )
    bar = Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)
    with bar:
        task = bar.add_task("", total=None)

        def report(done: int, total: int, text: str = "") -> None:
            bar.update(task, completed=done, total=total, description=text)
            shown = done in (1, total) or done % -(-total // PROGRESS_LINES) == 0
            if lines and shown and not stderr.is_terminal:
                stderr.print(f"{title:<9}{done:>6}/{total:<6}{text}", soft_wrap=True)

        yield report
