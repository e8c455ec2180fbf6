"""Whether a backward pass is running, and the slots that a failed one left behind."""

from __future__ import annotations

import torch

from ultraep.microbatch import Replicas


def in_backward() -> bool:
    """Whether autograd is running in this thread, so that a forward pass is a recomputation."""
    return _backward_pass() != -1


def _backward_pass() -> int:
    """The number of the backward pass that runs in this thread; -1: there is none."""
    return torch._C._current_graph_task_id()


class LentInBackward:
    """The replicas of one rank whose slots a backward pass is using.

    A pass that raises an exception does not give its slots back. The next one to need slots does.
    """

    def __init__(self) -> None:
        self._lent: list[tuple[int, Replicas]] = []

    def add(self, replicas: Replicas) -> None:
        """Note replicas whose slots were just lent, if backward is running."""
        if in_backward():
            self._lent.append((_backward_pass(), replicas))

    def discard(self, replicas: Replicas) -> None:
        """Forget replicas whose slots were given back."""
        self._lent = [(number, other) for number, other in self._lent if other is not replicas]

    def give_back(self) -> None:
        """Give back the slots of all backward passes but the one that is running."""
        for number, replicas in self._lent:
            if number != _backward_pass():
                replicas.__exit__(None, None, None)
