"""MoE models of torchtitan, balanced: overrides, which the framework takes by their names.

    --override.imports 'ultraep.integrations.torchtitan.balanced={"slots":1}'
                       ultraep.integrations.torchtitan.metrics

balanced   its routed experts, with copies of hot ones in spare slots
metrics    its metrics, with imbalance, copies and bytes among them
"""

from typing import Any

from ultraep.integrations.library import TORCHTITAN
from ultraep.integrations.torchtitan.check import balancer_options, check_axes, check_layer

TORCHTITAN.check()  # before what needs it

from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.config.override import derive, override  # noqa: E402
from torchtitan.models.common.moe import RoutedExperts  # noqa: E402

from ultraep.integrations.torchtitan.experts import BalancedRoutedExperts  # noqa: E402
from ultraep.integrations.torchtitan.figures import BalancedMetrics, balancers  # noqa: E402

__all__ = ["BalancedMetrics", "BalancedRoutedExperts", "balanced", "balancers", "metrics"]


@override(target=RoutedExperts.Config, description="expert parallelism balanced by ultraep")  # type: ignore[untyped-decorator]
def balanced(cfg: Any, *, slots: int = 1, policy: str = "ultraep", **options: Any) -> Any:
    """The configuration of balanced experts in place of `cfg`, called by the framework.

    slots, policy, options: see `Balancer` and `BalanceConfig`.
    """
    kinds = cfg, cfg.token_dispatcher, cfg.inner_experts
    check_layer(*(kind._owner.__name__ for kind in kinds))
    sharding = cfg.inner_experts.sharding_config
    layouts = sharding.state_shardings.values() if sharding is not None else []
    check_axes([axis.value for layout in layouts for axis in layout.axes()])
    given = balancer_options(slots, policy, options)
    return derive(cfg, BalancedRoutedExperts.Config, balancer_options=given)


@override(target=MetricsProcessor.Config, description="metrics of ultraep among the framework's")  # type: ignore[untyped-decorator]
def metrics(cfg: Any) -> Any:
    """The configuration of metrics with ours in place of `cfg`, called by the framework."""
    return derive(cfg, BalancedMetrics.Config)
