"""History: the loads that a layer saw, for policies that place by them.

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


class Moment(NamedTuple):
    """Where the loads of a microbatch stand in the history of its layer."""

    before: IntArray  # [E] the loads that came before these in this layer; these if none did
    number: int | None  # of the microbatch in this layer; None: computed again, and forgotten


class History:
    """The last loads of every layer."""

    def __init__(self) -> None:
        self._loads: dict[int, deque[IntArray]] = defaultdict(lambda: deque(maxlen=REMEMBERED + 1))
        self._numbers: dict[int, deque[int | None]] = defaultdict(
            lambda: deque(maxlen=REMEMBERED + 1)
        )
        self._counts: dict[int, int] = defaultdict(int)

    def note(self, layer: int, loads_E: IntArray, *, again: bool) -> Moment:
        """Remember these loads, unless they were here before.

        again: whether forward is computed again, in backward.
        """
        known, numbers = self._loads[layer], self._numbers[layer]
        number = None
        if again:
            for index in range(len(known) - 1, -1, -1):
                if np.array_equal(known[index], loads_E):
                    return Moment(known[max(0, index - 1)], numbers[index])
        else:
            number = self._counts[layer]
            self._counts[layer] += 1
        known.append(loads_E)
        numbers.append(number)
        return Moment(known[max(0, len(known) - 2)], number)


def in_backward() -> bool:
    """Whether autograd runs in this thread, so that a forward pass can only be a second one."""
    return torch._C._current_graph_task_id() != -1
