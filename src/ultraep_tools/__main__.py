"""Start the command `ultraep` such that Ctrl-C prints one line, even while the package loads.

It imports nothing of `ultraep` before `main` runs, because that imports NumPy.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

SOON = 0.05  # seconds


class _Interrupts:
    """Turn Ctrl-C into one line, even if a loading extension module raises another error for it."""

    interrupted = False

    def __enter__(self) -> None:
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(signal.SIGALRM, self._interrupt)
        sys.unraisablehook = self._retry

    def _interrupt(self, *_: Any) -> None:
        self.interrupted = True
        raise KeyboardInterrupt

    def _retry(self, unraisable: Any) -> None:
        """Interrupt again if Python ignored the exception, as it does in callbacks of imports."""
        if unraisable.exc_type is not KeyboardInterrupt:
            sys.__unraisablehook__(unraisable)
        else:
            signal.setitimer(signal.ITIMER_REAL, SOON)

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if self.interrupted and error is not None and not isinstance(error, SystemExit):
            print("ultraep: interrupted", file=sys.stderr)
            sys.exit(130)


def main() -> None:
    """Run the command line; the entry point."""
    with _Interrupts():
        try:
            import ultraep  # noqa: F401  refuses an older Python
            from ultraep_tools.cli import main as run
        except ImportError as error:
            if sys.version_info >= (3, 11):  # noqa: UP036  the package refuses older ones
                raise
            sys.exit(f"ultraep: {error}")
        run()


if __name__ == "__main__":
    main()
