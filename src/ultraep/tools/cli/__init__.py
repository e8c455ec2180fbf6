"""The command `ultraep`: plan loads from a file, simulate a cluster, read traces, take a tour,
describe this installation.

`commands.py` has them all. It is imported when `main` runs, so that Ctrl-C meanwhile is one line.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, NoReturn

CLOSED_PIPE = 141  # as of a process that SIGPIPE ends: `| head` is no failed check


def main() -> None:
    """Run the command line; the entry point of the package."""
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    _show_notices()
    try:
        from ultraep.tools.cli.commands import app

        app(prog_name="ultraep")
    except KeyboardInterrupt:
        print("ultraep: interrupted", file=sys.stderr)
        sys.exit(130)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich and Typer exit with 1
            _give_up(end.__context__)
        raise
    except OSError as error:
        _give_up(error)
    finally:
        _flush()


def _show_notices() -> None:
    """Print a line on stderr while the planner is compiled: a pipe sees no progress bar."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("ultraep: %(message)s"))
    notices = logging.getLogger("ultraep.compile")
    notices.addHandler(handler)
    notices.setLevel(logging.INFO)


def _flush() -> None:
    """Write what is left."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        _give_up(error)


def _give_up(error: OSError) -> NoReturn:
    """End with one line about what the system refused; a closed pipe ends silently."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
    if isinstance(error, BrokenPipeError):
        sys.exit(CLOSED_PIPE)
    reason = error.strerror or str(error)
    if error.filename is None:
        reason = f"standard output cannot be written: {reason}"
    else:
        reason = f"{error.filename}: {reason}"
    from ultraep.tools.cli.terminal import complain

    complain(reason)
    sys.exit(2)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'ultraep.tools.cli' has no attribute {name!r}")
    from ultraep.tools.cli.commands import app

    return app
