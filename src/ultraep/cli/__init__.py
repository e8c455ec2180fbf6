"""The command `ultraep`: plan loads from a file, simulate a cluster, read traces, take a tour,
describe this installation.

`commands.py` has them all. It is imported when `main` runs, so that Ctrl-C meanwhile is one line.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn


def main() -> None:
    """Run the command line; the entry point of the package."""
    try:
        from ultraep.cli.commands import app

        app(prog_name="ultraep")
    except KeyboardInterrupt:
        print("ultraep: interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        _give_up(error)
    finally:
        _flush()


def _flush() -> None:
    """Write what is left."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        _give_up(error)


def _give_up(error: OSError) -> NoReturn:
    """What the system refuses is one line; a reader that went away (`| head`) not even that."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whatever is still to be said
    if isinstance(error, BrokenPipeError):
        sys.exit(1)
    print(f"ultraep: {error}", file=sys.stderr)
    sys.exit(2)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'ultraep.cli' has no attribute {name!r}")
    from ultraep.cli.commands import app

    return app
