"""Pricing: the rates of every layer of a balancer, given or measured, and who is told of them."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, replace

from ultraep.comm import Communicator
from ultraep.config import BalanceConfig, Rates
from ultraep.errors import ConfigError
from ultraep.microbatch import Inputs
from ultraep.runtime.agreement import Agreement, Place, Point
from ultraep.runtime.mapped.peers import SilentCommunicator
from ultraep.runtime.rates import Kind, PriceList, Trial, measure
from ultraep.runtime.streams import capturing
from ultraep.topology import Topology

VARIABLE = "ULTRAEP_RATES"  # in the environment: rates for all balancers that would measure them
OFF = "off"
PRICED = "ultraep"  # the policy that looks at rates
UNKNOWN = (
    "its rates are unknown: none were measured before a graph was captured, or the layer has "
    "no `serve`, and BalanceConfig(rates=...) was not given"
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


class Pricing:
    """The rates that the layers of one balancer are planned by."""

    def __init__(self, topology: Topology, comm: Communicator, agreement: Agreement) -> None:
        self._topology, self._comm, self._agreement = topology, comm, agreement
        self._of_kind: dict[Kind, PriceList] = {}
        self._of_layer: dict[int, PriceList] = {}
        self._priced: dict[tuple[BalanceConfig, Rates], BalanceConfig] = {}
        self._logged = False

    def lacks_rates(self, inputs: Inputs) -> bool:
        """Whether the plan depends on rates that are unknown and can be measured now."""
        info = inputs.info
        if info.again or info.layer in self._of_layer or not self._depends(inputs.config):
            return False
        measurable = None not in (inputs.layer.serve, inputs.tokens, inputs.gates)
        return measurable and not capturing(inputs.ids.device)

    def measure(self, inputs: Inputs, trial: Trial) -> None:
        """Measure the rates of the layer, unless those of its kind are known; collective."""
        layer, kind = inputs.info.layer, Kind.of(inputs)
        if kind not in self._of_kind:
            self._agreement.meet(Place(Point.RATES, layer, inputs.info.step), inputs.ids.device)
            prices = measure(inputs, trial, kind, self._topology, self._comm)
            logger.info("rates of layer %d and all like it: %s", layer, prices)
            self._of_kind[kind] = prices
        self._of_layer[layer] = self._of_kind[kind]

    def config_for(self, inputs: Inputs, rows: int) -> BalanceConfig:
        """The config with rates for so many rows of all ranks, if it depends on them."""
        config, layer = inputs.config, inputs.info.layer
        if not self._depends(config):
            return config
        prices = self._of_layer.get(layer)
        if prices is None:
            if not self._logged:
                self._logged = True
                logger.info("layer %d is planned for balance, not for time: %s", layer, UNKNOWN)
            return config
        rates = prices.at(rows // self._topology.experts)
        if (config, rates) not in self._priced:
            self._priced[config, rates] = replace(config, rates=rates)
        return self._priced[config, rates]

    def _depends(self, config: BalanceConfig) -> bool:
        return self._topology.can_replicate and asks(config)

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
