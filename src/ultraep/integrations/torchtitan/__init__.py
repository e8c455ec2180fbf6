"""Balanced MoE models of torchtitan, as overrides that the framework loads by name.

    --override.imports 'ultraep.integrations.torchtitan.balanced={"slots":1}'
                       ultraep.integrations.torchtitan.metrics

balanced   routed experts with replicas of hot experts in spare slots
metrics    the framework's metrics plus imbalance, replicas and bytes sent
"""

from dataclasses import dataclass
from typing import Any

import ultraep.metrics.names as names
from ultraep.integrations.library import TORCHTITAN
from ultraep.integrations.torchtitan.check import balancer_options, check_axes, check_layer
from ultraep.metrics.sinks import line_of
from ultraep.runtime.balancer import Balancer

TORCHTITAN.check()  # before importing it

from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.config.override import derive, override  # noqa: E402
from torchtitan.models.common.moe import RoutedExperts  # noqa: E402
from torchtitan.tools.logging import logger  # noqa: E402

from ultraep.integrations.torchtitan.experts import BalancedRoutedExperts  # noqa: E402

__all__ = ["BalancedMetrics", "BalancedRoutedExperts", "balanced", "balancers", "metrics"]


@override(target=RoutedExperts.Config, description="expert parallelism balanced by ultraep")  # type: ignore[untyped-decorator]
def balanced(cfg: Any, *, slots: int = 1, policy: str = "ultraep", **options: Any) -> Any:
    """Return the configuration of balanced experts; called by the framework.

    slots, policy, options: see `Balancer` and `BalanceConfig`.
    """
    configs = cfg, cfg.token_dispatcher, cfg.inner_experts
    check_layer(*(config._owner.__name__ for config in configs))
    sharding = cfg.inner_experts.sharding_config
    layouts = sharding.state_shardings.values() if sharding is not None else []
    check_axes([axis.value for layout in layouts for axis in layout.axes()])
    own = balancer_options(slots, policy, options)
    return derive(cfg, BalancedRoutedExperts.Config, balancer_options=own)


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


@override(target=MetricsProcessor.Config, description="metrics of ultraep among the framework's")  # type: ignore[untyped-decorator]
def metrics(cfg: Any) -> Any:
    """The configuration of metrics with ours in place of `cfg`, called by the framework."""
    return derive(cfg, BalancedMetrics.Config)
