"""Start the command `ultraep`. Ctrl-C prints one line, also while the package loads."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; the entry point."""
    try:
        import ultraep  # noqa: F401  refuses an older Python
        from ultraep_tools.cli import main as run
    except ImportError as error:
        if sys.version_info >= (3, 11):  # noqa: UP036  the package refuses older ones
            raise
        sys.exit(f"ultraep: {error}")
    except KeyboardInterrupt:
        print("ultraep: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
