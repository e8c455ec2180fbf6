"""A callback for the Trainer of transformers and the trainers of TRL: imbalance in their logs."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from ultraep.errors import ConfigError
from ultraep.integrations.transformers.balance import balancers

PREFIX = "ultraep"


class ImbalanceCallback(TrainerCallback):  # type: ignore[misc]
    """Adds what balancing did since the last log, on this rank, to the logs of a trainer.

    ultraep/imbalance_before, ultraep/imbalance_after: load of the busiest rank over the mean,
        without replicas and as planned, averaged over layers and microbatches.
    ultraep/replicas: replicas per optimizer step, of all layers.

    It reads running sums when the trainer logs, so a step costs nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._balancers = balancers(model)
        if not self._balancers:
            raise ConfigError(f"{type(model).__name__} is not balanced: call balance first")
        self._last, self._last_step = self._sums(), 0

    def add_to(self, trainer: Any) -> None:
        """Add the callback to a trainer, before the callbacks that report logs elsewhere."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Count from here on."""
        self._last, self._last_step = self._sums(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
        """Add the figures to the logs and to the history of the trainer."""
        sums = self._sums()
        microbatches, before, after, copies = (
            now - last for now, last in zip(sums, self._last, strict=True)
        )
        if not microbatches or logs is None:
            return
        steps = max(1, state.global_step - self._last_step)
        figures = {
            f"{PREFIX}/imbalance_before": round(before / microbatches, 4),
            f"{PREFIX}/imbalance_after": round(after / microbatches, 4),
            f"{PREFIX}/replicas": round(copies / steps, 4),
        }
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)
        self._last, self._last_step = sums, state.global_step

    def _sums(self) -> tuple[float, ...]:
        """Microbatches, sums of imbalances before and after, and replicas so far."""
        totals = [0.0, 0.0, 0.0, 0.0]
        for balancer in self._balancers:
            stats = balancer.stats()
            count = stats["microbatches"]
            own = count, stats["imbalance_before"] * count, stats["imbalance_after"] * count
            for index, number in enumerate((*own, stats["copies"])):
                totals[index] += number
        return tuple(totals)
