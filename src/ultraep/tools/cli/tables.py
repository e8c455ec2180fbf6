"""Tables of strings on the terminal, as the commands that write reports have them."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box

from ultraep.tools.cli.terminal import Grid


def grid_of(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Grid:
    """A table whose first column is on the left, and all others on the right."""
    grid = Grid(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for number, name in enumerate(head):
        grid.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    return grid
