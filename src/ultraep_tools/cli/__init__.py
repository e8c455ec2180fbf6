"""The command `ultraep`. `commands.py` lists its subcommands and is imported when `main` runs."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

CLOSED_PIPE = 141  # exit code of a process that SIGPIPE ends, as in `ultraep ... | head`


def main() -> None:
    """Run the command line; the entry point of the package."""
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        from ultraep_tools.cli.commands import app

        try:
            app(prog_name="ultraep")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("ultraep: interrupted", file=sys.stderr)
        sys.exit(130)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich and Typer exit with 1
            _exit_on(end.__context__)
        raise
    except OSError as error:
        _exit_on(error)


def _exit_on(error: OSError) -> NoReturn:
    """Print the error in one line and exit; exit silently if a pipe was closed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards buffered output
    if isinstance(error, BrokenPipeError):
        sys.exit(CLOSED_PIPE)
    from ultraep_tools.cli.terminal import print_error

    reason = error.strerror or str(error)
    print_error(f"{error.filename or 'standard output cannot be written'}: {reason}")
    sys.exit(2)
