"""What is printed: consoles, tables and error lines that suit any terminal and any file name."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ultraep.topology import Topology

WIDEST = 10_000  # columns; wide enough for any table


def plain(text: str) -> str:
    r"""Escape control characters: a file name must not reach the terminal as a command.

    >>> plain("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def complain(message: object) -> None:
    """Print one line on stderr."""
    if sys.stderr is not None:
        print(f"ultraep: {plain(' '.join(str(message).split()))}", file=sys.stderr)


class PlainConsole(Console):
    """A console that escapes control characters in whatever it prints."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of a renderable."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else plain(text), style, control)


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that takes text literally: brackets and colons have no meaning in it."""
    return PlainConsole(stderr=stderr, markup=False, highlight=False, emoji=False)


class Grid(Table):
    """A table; where the terminal is too narrow for its words, a paragraph for every row."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(max_width=WIDEST)
        if self.__rich_measure__(console, unbounded).minimum <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield Text(str(self.title))
        names = [" ".join(str(column.header).split()) for column in self.columns]
        width = max(map(len, names[1:]), default=0)
        for first, *cells in zip(*(column.cells for column in self.columns), strict=True):
            yield _text(first)
            for name, cell in zip(names[1:], cells, strict=True):
                yield Text.assemble("  ", f"{name:<{width}} ".lstrip(), _text(cell))


def _text(cell: Any) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def make_grid(*headers: str, padding: tuple[int, int, int, int] = (0, 1, 0, 1)) -> Grid:
    """Return a table whose first column holds names and whose other columns hold numbers."""
    grid = Grid(box=box.SIMPLE_HEAD, padding=padding, pad_edge=False, show_edge=False)
    for index, header in enumerate(headers):
        grid.add_column(header, justify="right" if index else "left", overflow="fold")
    return grid


def count(number: int, word: str) -> str:
    """Return a number with its noun.

    >>> count(1, "rank"), count(2000, "microbatch")
    ('1 rank', '2,000 microbatches')
    """
    plural = "es" if word.endswith("ch") else "s"
    return f"{number:,} {word}{'' if number == 1 else plural}"


def describe_topology(topology: Topology) -> list[str]:
    """Return ranks, experts, spare slots and domains in words."""
    parts = [
        count(topology.ranks, "rank"),
        count(topology.experts, "expert"),
        f"{count(topology.slots, 'spare slot')} each",
    ]
    if topology.num_domains > 1:
        parts.append(f"domains of {count(topology.domain_size, 'rank')}")
    return parts


def print_records(records: Iterable[dict[str, Any]]) -> None:
    """Print a JSON list with one record per line."""
    print("[\n" + ",\n".join(map(json.dumps, records)) + "\n]")
