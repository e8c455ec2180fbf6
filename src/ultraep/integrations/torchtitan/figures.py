"""What was balanced, among the framework's own metrics: in its console, TensorBoard, W&B."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools.logging import logger

import ultraep.metrics.names as names
from ultraep.integrations.torchtitan.experts import BalancedRoutedExperts
from ultraep.metrics.sinks import line_of
from ultraep.runtime.balancer import Balancer


class BalancedMetrics(MetricsProcessor):  # type: ignore[misc]
    """The framework's metrics and ours, since the last time they were logged.

    Imbalance and copies are those of the group, bytes those of the rank that logs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        """That of the framework."""

    def log(self, *given: Any, extra_metrics: dict[str, Any] | None = None) -> None:
        """As the framework does, with ours among the metrics."""
        super().log(*given, extra_metrics={**(extra_metrics or {}), **self._balanced("ultraep")})

    def log_validation(self, *given: Any, extra_metrics: dict[str, Any] | None = None) -> None:
        """As the framework does, with ours among the metrics."""
        ours = self._balanced("validation_metrics/ultraep")
        super().log_validation(*given, extra_metrics={**(extra_metrics or {}), **ours})

    def _balanced(self, prefix: str) -> dict[str, float]:
        found = summary(balancers(self.model_parts or []))
        if found:
            logger.info(f"ultraep: {line_of(found)}")
        return {f"{prefix}/{name}": value for name, value in found.items()}


def balancers(parts: list[Any]) -> list[Balancer]:
    """Who balances these parts of a model: one for each number of experts that layers have."""
    layers = [m for part in parts for m in part.modules() if isinstance(m, BalancedRoutedExperts)]
    return list({id(m.balancer): m.balancer for m in layers if m.balancer is not None}.values())


def summary(owners: list[Balancer]) -> dict[str, float]:
    """Means over the microbatches of all, and sums; they begin to count anew."""
    stats = [owner.stats() for owner in owners]
    for owner in owners:
        owner.reset_stats()
    count = sum(found["microbatches"] for found in stats)
    if not count:
        return {}
    means = {n: sum(f[n] * f["microbatches"] for f in stats) / count for n in names.MEANS}
    worst = {names.WORST: max(found[names.WORST] for found in stats)}
    return means | worst | {n: float(sum(f[n] for f in stats)) for n in names.SUMS}
