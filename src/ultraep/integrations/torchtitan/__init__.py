"""Balanced MoE models of torchtitan: overrides that the framework imports by name.

    --override.imports 'ultraep.integrations.torchtitan.balanced={"slots":1}'
                       ultraep.integrations.torchtitan.metrics

balanced   routed experts with replicas of busy experts in spare slots
metrics    metrics with imbalance, replicas and bytes
"""

from dataclasses import dataclass
from typing import Any

from ultraep.integrations.torchtitan.check import (
    balancer_options,
    check_axes,
    check_dispatcher,
    check_layer,
)
from ultraep.metrics.exporters import line_of
from ultraep.runtime.balancer import Balancer
from ultraep.supported import TORCHTITAN

TORCHTITAN.check()  # before importing it

from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.config.override import derive, override  # noqa: E402
from torchtitan.models.common.moe import RoutedExperts  # noqa: E402
from torchtitan.tools.logging import logger  # noqa: E402

from ultraep.integrations.torchtitan.experts import BalancedRoutedExperts  # noqa: E402

__all__ = ["BalancedMetrics", "BalancedRoutedExperts", "balanced", "balancers", "metrics"]


@override(target=RoutedExperts.Config, description="expert parallelism balanced by ultraep")  # type: ignore[untyped-decorator]
def balanced(cfg: Any, *, slots: int = 1, policy: str = "ultraep", **options: Any) -> Any:
    """Return the configuration of balanced experts in place of `cfg`; the framework calls it.

    slots, policy, options: see `Balancer` and `BalanceConfig`.
    """
    configs = cfg, cfg.token_dispatcher, cfg.inner_experts
    names = [config._owner.__name__ for config in configs]
    check_layer(*names)
    check_dispatcher(names[1], cfg.token_dispatcher)
    sharding = cfg.inner_experts.sharding_config
    layouts = sharding.state_shardings.values() if sharding is not None else []
    check_axes([axis.value for layout in layouts for axis in layout.axes()])
    balancing = balancer_options(slots, policy, options)
    return derive(cfg, BalancedRoutedExperts.Config, balancer_options=balancing)


class BalancedMetrics(MetricsProcessor):  # type: ignore[misc]
    """The framework's metrics, with figures of the balancers since the last log.

    Imbalance and replicas are figures of the group, bytes of the rank that logs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        """The framework's configuration."""

    def log(self, *args: Any, extra_metrics: dict[str, Any] | None = None) -> None:
        """Log the framework's metrics and ours."""
        super().log(*args, extra_metrics=(extra_metrics or {}) | self._balanced("ultraep"))

    def log_validation(self, *args: Any, extra_metrics: dict[str, Any] | None = None) -> None:
        """Log the framework's metrics and ours."""
        ours = self._balanced("validation_metrics/ultraep")
        super().log_validation(*args, extra_metrics=(extra_metrics or {}) | ours)

    def _balanced(self, prefix: str) -> dict[str, float]:
        values = summary(balancers(self.model_parts or []))
        if values:
            logger.info(f"ultraep: {line_of(values)}")
        return {f"{prefix}/{name}": value for name, value in values.items()}


def balancers(parts: list[Any]) -> list[Balancer]:
    """Return the balancers of these model parts: one per number of experts in a layer."""
    layers = [m for part in parts for m in part.modules() if isinstance(m, BalancedRoutedExperts)]
    return list(dict.fromkeys(m.balancer for m in layers if m.balancer is not None))


def summary(owners: list[Balancer]) -> dict[str, float]:
    """Return means and sums over the microbatches of all balancers; reset their stats."""
    stats = [owner.stats() for owner in owners]
    for owner in owners:
        owner.reset_stats()
    count = sum(s["microbatches"] for s in stats)
    if not count:
        return {}
    means = ("imbalance_before", "imbalance_after")
    sums = ("copies", "weights_bytes_sent", "gradients_bytes_sent")
    values = {name: sum(s[name] * s["microbatches"] for s in stats) / count for name in means}
    values["imbalance_worst"] = max(s["imbalance_worst"] for s in stats)
    return values | {name: float(sum(s[name] for s in stats)) for name in sums}


@override(target=MetricsProcessor.Config, description="metrics of ultraep among the framework's")  # type: ignore[untyped-decorator]
def metrics(cfg: Any) -> Any:
    """Return the configuration of balanced metrics in place of `cfg`; the framework calls it."""
    return derive(cfg, BalancedMetrics.Config)
