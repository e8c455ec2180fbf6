"""Foresight: the plans of steps whose routes are known before their first layer runs.

    foresee     loads of all layers in one collective, all plans, replicas of the first layer
    layer l     compares its loads with the foreseen ones, takes its plan and its replicas;
                replicas of layer l + 1 travel beside its experts (messages) or after them (kernels)
    backward    the same for replicas of layer l - 1

A step stays here until its backward pass, because activation checkpointing begins its layers again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias
from weakref import WeakMethod, ref

import torch

from ultraep.bundle import Bundle
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError, LoadError
from ultraep.microbatch import Foreseen, Inputs, Layer, MicrobatchInfo
from ultraep.runtime.microbatch import NO_PASS, backward_pass
from ultraep.runtime.versions import count_optimizer_steps, optimizer_steps

ReadWeights: TypeAlias = Callable[[], Bundle | None]


class Foresight:
    """The layers of one balancer and their foreseen steps; the last one may not have begun."""

    def __init__(self) -> None:
        self._readers: list[ReadWeights] = []  # of the weights, by layer
        self._steps: list[list[Foreseen]] = []
        self._recompute = False  # whether the last step begins in backward
        self._optimizer_steps = 0
        count_optimizer_steps()

    @property
    def layers(self) -> int:
        """Number of registered layers."""
        return len(self._readers)

    def register(self, weights: ReadWeights | None) -> int:
        """Add a layer whose weights this method reads; return its number. Weakly referenced."""
        self._readers.append(_reader(None if weights is None else WeakMethod(weights)))
        return len(self._readers) - 1

    def inputs(
        self,
        infos: Sequence[MicrobatchInfo],
        routes: Iterable[torch.Tensor],
        config: BalanceConfig,
        *,
        reads: bool,
    ) -> list[Inputs]:
        """Return the inputs of the microbatches of all layers; reads: with their weights."""
        bundles = [read() or {} if reads else {} for read in self._readers]
        return [
            Inputs(info, Layer(index, bundle), config, ids, None, None, shares_slots=True)
            for index, (info, bundle, ids) in enumerate(zip(infos, bundles, routes, strict=True))
        ]

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

    def add(self, layers: Sequence[Foreseen], *, recompute: bool) -> None:
        """Add a step and begin to send the replicas of its first layer."""
        for foreseen, read in zip(layers, self._readers, strict=True):
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


def _reader(method: WeakMethod[ReadWeights] | None) -> ReadWeights:
    """Return a function that reads the weights of a layer; None where they are gone."""

    def read() -> Bundle | None:
        function = None if method is None else method()
        return None if function is None else function()

    return read


def begin(foreseen: Foreseen, info: MicrobatchInfo) -> MicrobatchInfo:
    """Return the info of a foreseen microbatch that begins, updated from a new one."""
    known, foreseen.info = foreseen.info, None
    if known is None or info.recomputed:
        return info
    known.step, known.start_time, known.timed = info.step, info.start_time, info.timed
    foreseen.forward = ref(known)
    return known


def invalid(routes: Any, layers: int) -> LoadError | None:
    """Return the error unless there are routes of all layers, each `[T, K]`."""
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


def send_next(foreseen: Foreseen, info: MicrobatchInfo) -> None:
    """Begin to send the replicas of the layer that follows.

    In backward, it is the layer before. If it was not recomputed itself, its forward pass has left
    replicas; a recomputed layer expects that the layer before is recomputed, too.
    """
    if backward_pass() == NO_PASS:
        if foreseen.after is not None and foreseen.after.info is not None:
            send_ahead(foreseen.after)
    elif foreseen.before is not None:
        last = foreseen.before.last and foreseen.before.last()
        if last is not None:
            if foreseen.before.weights() is not None:
                last.begin_ahead()
        elif info.recomputed:
            send_ahead(foreseen.before)


def send_ahead(foreseen: Foreseen) -> None:
    """Begin to send the replicas of a layer, if its weights are readable and a buffer is free."""
    weights = foreseen.weights()
    if foreseen.ahead is None and weights is not None:
        replicas = foreseen.make_replicas(weights)
        if replicas.begin_ahead():
            foreseen.ahead = replicas
