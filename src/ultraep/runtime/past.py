"""Past: the loads that a layer saw, for policies that place by them.

A forward pass that is computed again in backward (activation checkpointing) must plan as it did the
first time. Its loads are not new: they are looked up, and their past is that of the first time.

Shapes: E experts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

import numpy as np
import torch

from ultraep.arrays import IntArray

REMEMBERED = 64  # microbatches of a layer; more can hardly wait for their backward pass


class Seen(NamedTuple):
    """Where the loads of a layer stand among those of before."""

    before: IntArray  # [E] the loads that came before these in this layer; these if none did
    number: int | None  # of the microbatch in this layer; None: computed again, and forgotten
    again: bool  # whether it is computed again, in backward


class Past:
    """The last loads of every layer."""

    def __init__(self) -> None:
        self._loads: dict[int, deque[IntArray]] = defaultdict(lambda: deque(maxlen=REMEMBERED + 1))
        self._numbers: dict[int, deque[int | None]] = defaultdict(
            lambda: deque(maxlen=REMEMBERED + 1)
        )
        self._counts: dict[int, int] = defaultdict(int)

    def see(self, layer: int, loads_E: IntArray) -> Seen:
        """Remember these loads, unless they were here before."""
        seen, numbers = self._loads[layer], self._numbers[layer]
        again, number = in_backward(), None
        if again:
            for index in range(len(seen) - 1, -1, -1):
                if np.array_equal(seen[index], loads_E):
                    return Seen(seen[max(0, index - 1)], numbers[index], again)
        else:
            number = self._counts[layer]
            self._counts[layer] += 1
        seen.append(loads_E)
        numbers.append(number)
        return Seen(seen[max(0, len(seen) - 2)], number, again)


def in_backward() -> bool:
    """Whether autograd runs in this thread, so that a forward pass can only be a second one."""
    return torch._C._current_graph_task_id() != -1
