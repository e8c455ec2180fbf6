"""The command `ultraep` from its first moment on: Ctrl-C while the package loads is one line, too.

Outside of the package, since importing any part of it imports NumPy first.
"""

import signal
import sys
from types import FrameType, TracebackType
from typing import Any

SOON = 0.05  # seconds


def main() -> None:
    """The entry point."""
    with _Interrupts():
        from ultraep.tools.cli import main as run

        run()


class _Interrupts:
    """Ctrl-C is one line, also where an extension module that loads makes another error of it."""

    noted = False

    def __enter__(self) -> None:
        signal.signal(signal.SIGINT, self._note)
        signal.signal(signal.SIGALRM, self._note)
        sys.unraisablehook = self._note_ignored

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.noted = True
        raise KeyboardInterrupt

    def _note_ignored(self, unraisable: Any) -> None:
        """Interrupt again where Python drops what a callback raises, as those of its imports."""
        if unraisable.exc_type is not KeyboardInterrupt:
            sys.__unraisablehook__(unraisable)
        else:
            signal.setitimer(signal.ITIMER_REAL, SOON)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.noted and error is not None and not isinstance(error, SystemExit):
            print("ultraep: interrupted", file=sys.stderr)
            sys.exit(130)


if __name__ == "__main__":
    main()
