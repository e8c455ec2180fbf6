"""Settings, balancers and counters that the balanced layers of a model share."""

from __future__ import annotations

import atexit
import logging
from abc import ABC, abstractmethod
from contextlib import ExitStack
from functools import cache, cached_property
from math import ceil
from typing import Any

from ultraep import __version__
from ultraep.bundle import Layout
from ultraep.config import BalanceConfig
from ultraep.integrations.common import outcome
from ultraep.integrations.serving.counters import ServingCounters, where_they_are
from ultraep.integrations.serving.settings import ServingSettings
from ultraep.runtime.balancer import Balancer
from ultraep.runtime.connect import idle_reason

# Mean rows of a rank over the rows that a replica must save. On two CPU ranks, where gloo and the
# experts share cores, batches with 5 times as many rows lost time.
MARGIN = 8
counters_of_process = cache(ServingCounters)  # prometheus_client registers names once


class Service(ABC):
    """The balanced layers of one model on this rank.

    layers: in the order of creation, the same on all ranks.
    others: names of the MoE layers whose class the plug-in does not replace.
    """

    def __init__(self, settings: ServingSettings, logger: str) -> None:
        self.settings, self.logger = settings, logging.getLogger(logger)
        self.layers: list[Any] = []
        self.others: list[str] = []
        self._balancers: dict[tuple[int, ...], Balancer] = {}

    @abstractmethod
    def reasons(self) -> list[str]:
        """Return why no layer is balanced; empty if all are. The same on all ranks."""

    @abstractmethod
    def group(self, device: str) -> Any:
        """Return the expert-parallel process group for this kind of device."""

    @abstractmethod
    def homes_of(self, layer: Any) -> tuple[int, ...]:
        """Return the home rank of every expert of a layer."""

    @abstractmethod
    def tokens(self) -> int:
        """Return the tokens of all ranks in this batch, the same number on all ranks."""

    @abstractmethod
    def most_tokens(self) -> int | None:
        """Return the most tokens that a batch of all ranks can have; None: unlimited."""

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
        """Create a balancer for each placement and register every layer. Collective."""
        with ExitStack() as undo:
            for layer in self.layers:
                homes = self.homes_of(layer)
                if homes not in self._balancers:
                    balancer = self._balancers[homes] = self._balancer(layer, homes)
                    undo.callback(balancer.close)
                    balancer.subscribe(counters_of_process(balancer.rank).add)
                layer.balancer = self._balancers[homes]
                layer.layer_index = layer.balancer.register_layer()
            atexit.register(undo.pop_all().close)

    def _balancer(self, layer: Any, homes: tuple[int, ...]) -> Balancer:
        settings = self.settings
        return Balancer(
            self.group(layer.w2_weight.device.type),
            experts=homes,
            slots=settings.slots,
            config=BalanceConfig(
                policy=settings.policy,
                tolerance=settings.tolerance,
                min_tokens_per_replica=settings.min_rows or 1,
                objective="balance" if settings.min_rows else "time",
            ),
            record=settings.record,
        )

    def check_alive(self) -> None:
        """Raise if a rank has died. Not collective; may take some seconds."""
        for balancer in self._balancers.values():
            balancer.comm.check_alive()

    def policy(self, layer: Any) -> str | None:
        """Return "none" for a batch that is too small to balance, else None."""
        return "none" if self.is_small(layer) else None

    def is_small(self, layer: Any) -> bool:
        """Return whether ranks have too few rows on average in this batch for replicas to pay.

        Without the setting `min_rows`, the first batch of a layer measures how many rows a replica
        must save to pay. All ranks know the same rates and token counts.
        """
        if layer.least_tokens is None:
            rows, margin = self.settings.min_rows, 1
            if rows is None:
                rows, margin = layer.balancer.rows_to_pay(layer.layer_index), MARGIN
            if rows is None:
                return False
            layer.least_tokens = ceil(margin * rows * layer.balancer.comm.size / layer.top_k)
            if self.is_first and layer is self.layers[0]:
                self.logger.info(which_batches(rows, layer.least_tokens, self.most_tokens()))
        return bool(self.tokens() < layer.least_tokens)

    def __str__(self) -> str:
        layer = self.layers[0]
        balancer = layer.balancer
        topology, config = balancer.topology, balancer.config
        nbytes = Layout.of(layer.bundle, layer.num_homes).nbytes * topology.slots
        untested = "" if layer.w2_weight.device.type == "cpu" else " (not tested on GPUs)"
        reason = idle_reason(topology, config.policy)
        line = outcome(len(self.layers), reason, slots=topology.slots)
        return (
            f"{line}: {topology.experts} experts over {topology.ranks} ranks{untested}, "
            f"policy {config.policy}, tolerance {config.tolerance:g}, "
            f"{nbytes / 1e6:,.1f} MB of slots; ultraep {__version__}; "
            f"{where_they_are()}"
        )


def which_batches(rows: int, least: int, most: int | None) -> str:
    """Return the log line about the rows of a replica and the tokens of a batch.

    >>> print(which_batches(2_000, 4_000, 1_000))
    ultraep: a replica pays from 2,000 rows on, so batches under 4,000 tokens are not balanced; \
no batch has more than 1,000
    """
    none = "" if most is None or most >= least else f"; no batch has more than {most:,}"
    return (
        f"ultraep: a replica pays from {rows:,} rows on, so batches under {least:,} tokens are "
        f"not balanced{none}"
    )
