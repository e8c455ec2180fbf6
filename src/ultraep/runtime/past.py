"""Past: the loads that a layer saw, for policies that place by them.

A forward pass that is computed again in backward (activation checkpointing) must plan as it did the
first time. Its loads are not new: they are looked up, and their past is that of the first time.

Shapes: E experts.
"""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np
import torch

from ultraep.arrays import IntArray

REMEMBERED = 64  # microbatches of a layer; more can hardly wait for their backward pass


class Past:
    """The last loads of every layer."""

    def __init__(self) -> None:
        self._loads: dict[int, deque[IntArray]] = defaultdict(lambda: deque(maxlen=REMEMBERED + 1))

    def before(self, layer: int, loads_E: IntArray) -> IntArray:
        """[E] the loads that came before these in this layer; these if there were none."""
        seen = self._loads[layer]
        if _in_backward():
            for index in range(len(seen) - 1, -1, -1):
                if np.array_equal(seen[index], loads_E):
                    return seen[max(0, index - 1)]
        seen.append(loads_E)
        return seen[max(0, len(seen) - 2)]


def _in_backward() -> bool:
    """Whether autograd runs in this thread, so that a forward pass can only be a second one."""
    return torch._C._current_graph_task_id() != -1
