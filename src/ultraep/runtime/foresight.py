"""Foresight: the plans of steps whose routes are known before their first layer runs.

    foresee     loads of all layers in one collective, all plans, replicas of the first layer
    layer l     compares its loads with the foreseen ones, takes its plan and its replicas;
                replicas of layer l + 1 travel beside its experts (messages) or after them (kernels)
    backward    the same for replicas of layer l - 1

A step stays here until its backward pass, because activation checkpointing begins its layers again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from weakref import ref

import torch

from ultraep.bundle import Bundle
from ultraep.errors import ConfigError, LoadError
from ultraep.microbatch import Foreseen, MicrobatchInfo
from ultraep.runtime.replicas import send_ahead
from ultraep.runtime.versions import count_optimizer_steps, optimizer_steps


class Foresight:
    """The foreseen steps of one balancer; the last one may not have begun."""

    def __init__(self) -> None:
        self._steps: list[list[Foreseen]] = []
        self._recompute = False  # whether the last step begins in backward
        self._optimizer_steps = 0
        count_optimizer_steps()

    def check_finished(self) -> None:
        """Raise if layers of the last step have not begun."""
        missing = [
            layer for layer, foreseen in enumerate(self._last()) if foreseen.info is not None
        ]
        if missing and not self._recompute:
            raise ConfigError(
                f"layers {missing} of the foreseen step have not begun: run them before the next "
                "foresee(), or call foresee(None) to drop the step"
            )

    def drop(self) -> None:
        """Forget all steps, and return slots whose layers will not begin."""
        for foreseen in self._last():
            if foreseen.ahead is not None:
                foreseen.ahead.give_back()
        self._steps.clear()

    def add(
        self,
        layers: Sequence[Foreseen],
        weights: Sequence[Callable[[], Bundle | None]],
        *,
        recompute: bool,
    ) -> None:
        """Add a step and begin to send the replicas of its first layer."""
        for foreseen, read in zip(layers, weights, strict=True):
            foreseen.weights = read
        for before, after in pairwise(layers):
            before.after, after.before = after, before
        if self._recompute:  # its layers that have not begun will not
            self.drop()
        waiting = [step for step in self._steps if any(map(_waits, step))]
        self._steps, self._recompute = [*waiting, list(layers)], recompute
        self._optimizer_steps = optimizer_steps.total
        send_ahead(layers[-1] if recompute else layers[0])

    def find(self, layer: int, *, recomputed: bool) -> Foreseen | None:
        """Return what is known of the microbatch that begins; None: nothing."""
        foreseen = self._last()[layer] if layer < len(self._last()) else None
        if recomputed:
            waiting = [step[layer] for step in self._steps if _waits(step[layer])]
            if self._recompute and foreseen is not None and foreseen.info is not None:
                waiting = [foreseen]
            # Plans of several steps could belong to it: then it is planned again.
            return waiting[0] if len(waiting) == 1 else None
        if foreseen is None or foreseen.info is None or self._recompute:
            return None
        if self._optimizer_steps != optimizer_steps.total:
            raise ConfigError(
                f"an optimizer has changed weights before layer {layer} of the foreseen step "
                "began: call foresee() after optimizer.step()"
            )
        return foreseen

    def _last(self) -> list[Foreseen]:
        return self._steps[-1] if self._steps else []


def begin(foreseen: Foreseen, info: MicrobatchInfo) -> MicrobatchInfo:
    """Return the info of a foreseen microbatch that begins, updated from a new one."""
    known, foreseen.info = foreseen.info, None
    if known is None or info.recomputed:
        return info
    known.step, known.start_time, known.timed = info.step, info.start_time, info.timed
    foreseen.forward = ref(known)
    return known


def invalid(routes: Any, layers: int) -> LoadError | None:
    """Return the error for routes that are not those of all layers, each `[T, K]`."""
    if len(routes) != layers:
        return LoadError(f"foresee() needs the routes of all {layers} layers, got {len(routes)}")
    for layer, ids in enumerate(routes):
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point():
            got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids)
            return LoadError(f"the routes of layer {layer} must be integers [tokens, K], got {got}")
        if ids.shape != routes[0].shape or ids.device != routes[0].device:
            return LoadError(
                f"the routes of layer {layer} are {list(ids.shape)} on {ids.device}, but those of "
                f"layer 0 are {list(routes[0].shape)} on {routes[0].device}: they need one shape"
            )
    return None


def _waits(foreseen: Foreseen) -> bool:
    """Whether backward may still recompute the layer."""
    info = foreseen.forward and foreseen.forward()
    return info is not None and not info.in_backward
