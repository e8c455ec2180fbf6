"""A log line when numba has to compile kernels of this package, which takes a while."""

from __future__ import annotations

import logging
from typing import Any

from numba.core import event

logger = logging.getLogger("ultraep.compile")


class CompileNotice(event.Listener):  # type: ignore[misc]
    """Logs one line per process; kernels that are in numba's cache on disk cause none."""

    given = False

    def on_start(self, event: Any) -> None:
        """Log the first compilation."""
        function = event.data["dispatcher"].py_func
        if not self.given and function.__module__.startswith("ultraep."):
            self.given = True
            logger.info("compiling the planner, which takes a while; later runs load it from disk")

    def on_end(self, event: Any) -> None:
        """Do nothing."""
