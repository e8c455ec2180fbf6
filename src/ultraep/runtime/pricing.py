"""Pricing: the rates of every layer of a balancer, given or measured, and who is told of them."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, replace
from typing import NamedTuple

import torch

from ultraep.bundle import Bundle
from ultraep.comm import Communicator
from ultraep.config import BalanceConfig, Rates
from ultraep.errors import ConfigError
from ultraep.plane import DataPlane, Loads, Microbatch
from ultraep.runtime.agreement import Agreement, Place, Point
from ultraep.runtime.mapped.peers import SilentCommunicator
from ultraep.runtime.observe import Watch
from ultraep.runtime.rates import Kind, PriceList, Serve, measure
from ultraep.topology import Topology

VARIABLE = "ULTRAEP_RATES"  # in the environment: rates for all balancers that would measure them
OFF = "off"
PRICED = "ultraep"  # the policy that looks at rates
UNKNOWN = (
    "its rates are not known: nothing was measured (learn_rates) before a graph was captured, nor "
    "was BalanceConfig(rates=...) given"
)

logger = logging.getLogger(__name__)


def from_environment(config: BalanceConfig) -> BalanceConfig:
    """The config with what the environment says, if rates would have to be measured."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text or config.objective != "time" or config.rates is not None:
        return config
    if text.lower() == OFF:
        return replace(config, objective="balance")
    try:
        return replace(config, rates=Rates.from_text(text))
    except ConfigError as error:
        raise ConfigError(
            f"the environment variable {VARIABLE} must be {OFF!r} or rates: {error}"
        ) from None


def measurable(config: BalanceConfig, comm: Communicator) -> BalanceConfig:
    """The config; without the objective "time" where its rates can never be measured."""
    if not isinstance(comm, SilentCommunicator) or not asks(config):
        return config
    logger.info("plans are made for balance: ranks of one thread need rates=")
    return replace(config, objective="balance")


class Group(NamedTuple):
    """Those who measure together, and who else listens."""

    comm: Communicator
    agreement: Agreement
    plane: DataPlane
    watch: Watch


class Pricing:
    """The rates that the layers of one balancer are planned by."""

    def __init__(self, topology: Topology) -> None:
        self._can_copy = topology.can_copy
        self._of_kind: dict[Kind, PriceList] = {}
        self._of_layer: dict[int, PriceList] = {}
        self._priced: dict[tuple[BalanceConfig, Rates], BalanceConfig] = {}
        self._said = False

    def lacks(self, microbatch: Microbatch, config: BalanceConfig) -> bool:
        """Whether it would be planned without rates, and they could be measured."""
        if microbatch.again or microbatch.layer in self._of_layer or not self._can_copy:
            return False
        return asks(config)

    def learn(
        self,
        group: Group,
        loads: Loads,
        serve: Serve,
        bundle: Bundle,
        rows: torch.Tensor,
        gates: torch.Tensor,
        *,
        again: bool,
    ) -> None:
        """Measure the rates of the layer, unless those of its kind are known; collective.

        again: see `Kind`.
        """
        layer, device = loads.microbatch.layer, loads.on_device.device
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing:
            return
        kind = Kind.of(bundle, rows, again=again)
        if kind not in self._of_kind:
            group.agreement.meet(Place(Point.RATES, layer, loads.microbatch.step), device)
            with group.watch.nobody():
                found = measure(group.plane, group.comm, loads, serve, bundle, rows, gates, kind)
            logger.info("rates of layer %d and all like it: %s", layer, found)
            self._of_kind[kind] = found
        self._of_layer[layer] = self._of_kind[kind]

    def config(self, loads: Loads, config: BalanceConfig) -> BalanceConfig:
        """The config with rates for such a microbatch, if it asks for them and they are known."""
        if not self._can_copy or not asks(config):
            return config
        layer = loads.microbatch.layer
        prices = self._of_layer.get(layer)
        if prices is None:
            if not self._said:
                self._said = True
                logger.info("layer %d is planned for balance, not for time: %s", layer, UNKNOWN)
            return config
        rates = prices.at(loads.about_rows // loads.on_device.shape[1])
        if (config, rates) not in self._priced:
            self._priced[config, rates] = replace(config, rates=rates)
        return self._priced[config, rates]

    @property
    def layers(self) -> int:
        """Layers whose rates are known."""
        return len(self._of_layer)

    def known(self) -> dict[int, dict[int, dict[str, int]]]:
        """The measured rates in plain numbers: by layer, from so many rows of an expert on."""
        return {
            layer: {least: asdict(rates) for least, rates in prices.steps}
            for layer, prices in sorted(self._of_layer.items())
        }

    def told(self, config: BalanceConfig) -> str:
        """The objective, in the words of `repr(balancer)`."""
        if config.objective == "balance":
            return "objective 'balance'"
        if config.rates is not None:
            return f"objective 'time' ({config.rates})"
        lists = dict.fromkeys(self._of_layer.values())
        return f"objective 'time' ({' and '.join(map(str, lists)) or 'no rates yet'})"


def asks(config: BalanceConfig) -> bool:
    """Whether rates decide, and none are given."""
    return config.objective == "time" and config.rates is None and config.policy == PRICED
