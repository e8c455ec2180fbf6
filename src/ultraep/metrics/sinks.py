"""Sinks: a line of the log, scalars for TensorBoard and W&B. Each takes readings and keeps none."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ultraep.metrics.names as names
from ultraep.errors import ConfigError
from ultraep.metrics.reading import Reading, Sink

LOGGER = "ultraep"


def line_of(values: Mapping[str, float]) -> str:
    """The values that matter most, in words."""
    left = values.get(names.SKIPPED)
    return (
        f"imbalance {values[names.BEFORE]:.3f} -> {values[names.AFTER]:.3f} "
        f"(worst {values[names.WORST]:.3f}), {values[names.COPIES]:.0f} copies, "
        f"sent {values[names.WEIGHTS] / 1e6:.1f} MB of weights, "
        f"{values[names.GRADIENTS] / 1e6:.1f} MB of gradients"
        + ("" if left is None else f", {left:.0%} left alone")
    )


class Log:
    """A line for every reading, and a warning when an alarm begins or ends."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger(LOGGER)
        self._known: set[str] = set()

    def __call__(self, reading: Reading) -> None:
        self._logger.info("ultraep: step %d: %s", reading.step, line_of(reading.values))
        for name in sorted(reading.alarms.keys() - self._known):
            self._logger.warning("ultraep: %s: %s", name, reading.alarms[name])
        for name in sorted(self._known - reading.alarms.keys()):
            self._logger.warning("ultraep: %s: is over at step %d", name, reading.step)
        self._known = set(reading.alarms)


def scalars(target: Any) -> Sink:
    """Scalars `ultraep/...` by step, for whatever draws them.

    target: a `SummaryWriter` of TensorBoard, a run of W&B, or a function of a dict and a step.
    """
    if hasattr(target, "add_scalar"):

        def tell(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                target.add_scalar(name, value, step)

    elif hasattr(target, "log"):

        def tell(values: dict[str, float], step: int) -> None:
            target.log(values, step=step)

    elif callable(target):
        tell = target
    else:
        raise ConfigError(
            f"scalars go to something with add_scalar or log, or to a function, got {target!r}"
        )

    def sink(reading: Reading) -> None:
        found = {f"{names.PREFIX}/{name}": value for name, value in reading.values.items()}
        found |= {f"{names.PREFIX}/alarm/{name}": 1.0 for name in reading.alarms}
        tell(found, reading.step)

    return sink
