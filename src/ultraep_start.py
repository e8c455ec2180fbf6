"""The command `ultraep` from its first moment on: Ctrl-C while the package loads is one line, too.

Outside of the package, since importing any part of it imports NumPy first.
"""

import sys


def main() -> None:
    """The entry point."""
    try:
        from ultraep.cli import main as run
    except KeyboardInterrupt:
        print("ultraep: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
