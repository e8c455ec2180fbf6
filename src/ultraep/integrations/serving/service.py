"""Settings, balancers and counters that the balanced layers of a model share."""

from __future__ import annotations

import atexit
import logging
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from ultraep import __version__
from ultraep.bundle import Layout
from ultraep.config import BalanceConfig
from ultraep.integrations.common import idle_reason, outcome
from ultraep.integrations.serving.counters import ServingCounters, where_they_are
from ultraep.integrations.serving.settings import ServingSettings
from ultraep.integrations.serving.thresholds import least_tokens, rows_to_pay
from ultraep.runtime.balancer import Balancer

counters_of_process = cache(ServingCounters)  # prometheus_client registers names once


@dataclass(frozen=True)
class LayerSize:
    """Size of a layer: home rank of every expert, experts per token, parameters of an expert."""

    homes: tuple[int, ...]
    top_k: int
    parameters: int


class Service(ABC):
    """The balanced layers of one model on this rank.

    layers: in the order of creation, the same on all ranks.
    others: names of the MoE layers whose class the plug-in does not replace.
    """

    def __init__(self, settings: ServingSettings, logger: str) -> None:
        self.settings, self.logger = settings, logging.getLogger(logger)
        self.layers: list[Any] = []
        self.others: list[str] = []
        self._balancers: dict[tuple[tuple[int, ...], int], Balancer] = {}
        self._least: dict[Balancer, int] = {}

    @abstractmethod
    def reasons(self) -> list[str]:
        """Return why no layer is balanced; empty if all are. The same on all ranks."""

    @abstractmethod
    def group(self, device: str) -> Any:
        """Return the expert-parallel process group for this kind of device."""

    @abstractmethod
    def size_of(self, layer: Any) -> LayerSize:
        """Return the size of a layer."""

    @abstractmethod
    def tokens(self) -> int:
        """Return the tokens of all ranks in this batch, the same number on all ranks."""

    @property
    @abstractmethod
    def is_first(self) -> bool:
        """Whether this process is the one that logs."""

    @cached_property
    def ready(self) -> bool:
        """Whether the layers are balanced. The first access is collective and logs the decision."""
        reasons = self.reasons()
        if not reasons:
            self._open()
        if self.is_first:
            level = logging.WARNING if reasons else logging.INFO
            self.logger.log(level, self._refusal(reasons) if reasons else str(self))
        return not reasons

    def _refusal(self, reasons: list[str]) -> str:
        return outcome(len(self.layers) + len(self.others), "; ".join(reasons[:4]))

    def _open(self) -> None:
        """Create a balancer for each size and register every layer. Collective."""
        with ExitStack() as undo:
            for layer in self.layers:
                size = self.size_of(layer)
                key = size.homes, size.top_k
                if key not in self._balancers:
                    balancer = self._balancers[key] = self._balancer(layer, size)
                    undo.callback(balancer.close)
                    balancer.subscribe(counters_of_process(balancer.rank).add)
                layer.balancer = self._balancers[key]
                layer.layer_index = layer.balancer.register_layer()
            atexit.register(undo.pop_all().close)

    def _balancer(self, layer: Any, size: LayerSize) -> Balancer:
        settings, device = self.settings, layer.w2_weight.device.type
        nbytes = Layout.of(layer.bundle, layer.num_homes).nbytes
        rows = settings.min_rows or rows_to_pay(nbytes, size.parameters, device)
        balancer = Balancer(
            self.group(device),
            experts=size.homes,
            slots=settings.slots,
            config=BalanceConfig(
                policy=settings.policy,
                tolerance=settings.tolerance,
                min_tokens_per_replica=rows,
                objective="balance",  # `rows` says which replicas pay
            ),
            record=settings.record,
        )
        self._least[balancer] = least_tokens(rows, balancer.comm.size, size.top_k)
        return balancer

    def check_alive(self) -> None:
        """Raise if a rank has died. Not collective; may take some seconds."""
        for balancer in self._balancers.values():
            balancer.comm.check_alive()

    def policy(self, balancer: Balancer) -> str | None:
        """Return "none" for a batch that is too small to balance, else None."""
        return "none" if self.is_small(balancer) else None

    def is_small(self, balancer: Balancer) -> bool:
        """Return whether this batch is too small to balance."""
        return self.tokens() < self._least[balancer]

    def __str__(self) -> str:
        layer = self.layers[0]
        balancer = layer.balancer
        topology, config = balancer.topology, balancer.config
        nbytes = Layout.of(layer.bundle, layer.num_homes).nbytes * topology.slots
        untested = "" if layer.w2_weight.device.type == "cpu" else " (not tested on GPUs)"
        line = outcome(len(self.layers), idle_reason(balancer), slots=topology.slots)
        return (
            f"{line}: {topology.experts} experts over {topology.ranks} ranks{untested}, "
            f"policy {config.policy}, tolerance {config.tolerance:g}, "
            f"{nbytes / 1e6:,.1f} MB of slots; ultraep {__version__}; "
            f"batches under {self._least[balancer]:,} tokens are not balanced, a replica serves "
            f"{config.min_tokens_per_replica:,} rows or more; {where_they_are()}"
        )
