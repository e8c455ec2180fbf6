"""Long work on the terminal: how far it is, and how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ultraep.tools.cli.terminal import make_console

LINES = 10  # of a phase, where there is no terminal

Tell = Callable[[int, int, str], None]  # how much of how much is done, and what it is


@contextmanager
def progress(what: str) -> Iterator[Tell]:
    """A bar on stderr that goes away again; a line now and then where that is no terminal."""
    stderr = make_console(stderr=True)
    columns = (
        *(TextColumn(f"{what:<9}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()),
        TextColumn("{task.description}", markup=False),
    )
    bar = Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)
    with bar:
        task = bar.add_task("", total=None)

        def tell(done: int, total: int, words: str) -> None:
            bar.update(task, completed=done, total=total, description=words)
            if not stderr.is_terminal and done % -(-total // LINES) == 0:
                stderr.print(f"{what:<9}{done:>6}/{total:<6}{words}", soft_wrap=True)

        yield tell


def duration(seconds: float) -> str:
    """A time, as exact as an estimate is.

    >>> duration(0.4), duration(47), duration(500), duration(9000)
    ('1 s', '50 s', '8 min', '2.5 h')
    """
    if seconds < 20:
        return f"{max(1, round(seconds))} s"
    if seconds < 100:
        return f"{round(seconds, -1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
