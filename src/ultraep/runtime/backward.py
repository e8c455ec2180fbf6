"""Whether a backward pass is running, and the slots that a failed one left behind."""

from __future__ import annotations

import torch

from ultraep.plane import Copies


def in_backward() -> bool:
    """Whether autograd is running in this thread, so that a forward pass is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class LentInBackward:
    """The copies of one rank whose slots a backward pass is using."""

    def __init__(self) -> None:
        self._lent: list[Copies] = []

    def __contains__(self, copies: Copies) -> bool:
        return any(other is copies for other in self._lent)

    def add(self, copies: Copies) -> None:
        """Note copies whose slots were just lent, if backward is running."""
        if in_backward():
            self._lent.append(copies)

    def discard(self, copies: Copies) -> None:
        """Forget copies whose slots were given back."""
        self._lent = [other for other in self._lent if other is not copies]

    def give_back(self) -> None:
        """Give back what a backward pass that raised an exception has kept."""
        if not in_backward():
            for copies in self._lent:
                copies.__exit__(None, None, None)
