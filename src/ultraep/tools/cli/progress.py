"""Progress of long work on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    track,
)

from ultraep.tools.cli.terminal import make_console

LINES = 10  # of a phase, where there is no terminal
LONG_WORK = 100  # plans from which on a progress bar is worth having

Tell = Callable[..., None]  # how much of how much is done, and what it is
Item = TypeVar("Item")


@contextmanager
def progress(what: str, *, lines: bool = True) -> Iterator[Tell]:
    """Show a bar on stderr that goes away again.

    lines: without a terminal, print a line now and then instead.
    """
    stderr = make_console(stderr=True)
    columns = (
        *(TextColumn(f"{what:<9}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()),
        TextColumn("{task.description}", markup=False),
    )
    bar = Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)
    with bar:
        task = bar.add_task("", total=None)

        def tell(done: int, total: int, words: str = "") -> None:
            bar.update(task, completed=done, total=total, description=words)
            if lines and not stderr.is_terminal and done % -(-total // LINES) == 0:
                stderr.print(f"{what:<9}{done:>6}/{total:<6}{words}", soft_wrap=True)

        yield tell


def track_planning(items: Sequence[Item], plans: int) -> Iterable[Item]:
    """Iterate with a bar on stderr, if there are many plans to make and stderr is a terminal."""
    stderr = make_console(stderr=True)
    quiet = plans < LONG_WORK or not stderr.is_terminal
    return track(items, "planning", console=stderr, transient=True, disable=quiet)


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
