"""Pricing: the rates that the layers of a balancer are planned with, given or measured."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, replace

from ultraep.arrays import IntArray
from ultraep.comm import Communicator
from ultraep.config import BalanceConfig, Rates
from ultraep.errors import ConfigError, errors_at
from ultraep.microbatch import Inputs
from ultraep.runtime.agreement import Agreement, At, Position
from ultraep.runtime.rates import LayerShape, PriceList, Trial, measure
from ultraep.runtime.streams import capturing
from ultraep.topology import Topology

VARIABLE = "ULTRAEP_RATES"  # environment variable with rates for all balancers
OFF = "off"
PRICED = "ultraep"  # the policy that uses rates
UNKNOWN = (
    "its rates are unknown: none were measured before a graph was captured, or the layer has "
    "no `serve`, and BalanceConfig(rates=...) was not given"
)

logger = logging.getLogger(__name__)


def from_environment(config: BalanceConfig) -> BalanceConfig:
    """Return the config with the rates of the environment, if it would need a measurement."""
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


def needs_rates(config: BalanceConfig) -> bool:
    """Whether plans depend on rates that the config does not have."""
    return config.objective == "time" and config.rates is None and config.policy == PRICED


class Pricing:
    """The measured rates of one balancer, by layer.

    always: measure them also if plans do not depend on them.
    """

    def __init__(
        self, topology: Topology, comm: Communicator, agreement: Agreement, *, always: bool = False
    ) -> None:
        self._topology, self._comm, self._agreement = topology, comm, agreement
        self._always = always and topology.can_replicate
        self._of_shape: dict[LayerShape, PriceList] = {}
        self._of_layer: dict[int, PriceList] = {}
        self._configs: dict[tuple[BalanceConfig, Rates], BalanceConfig] = {}
        self._logged = False

    def lacks_rates(self, inputs: Inputs) -> bool:
        """Whether the plan depends on rates that are unknown and can be measured now."""
        info = inputs.info
        if info.recomputed or info.layer in self._of_layer:
            return False
        if not (self._always or self._depends(inputs.config)):
            return False
        measurable = None not in (inputs.layer.serve, inputs.tokens, inputs.gates)
        return measurable and not capturing(inputs.ids.device)

    def measure(self, inputs: Inputs, trial: Trial) -> None:
        """Measure the rates of the layer, unless a layer of its shape was measured; collective."""
        layer, shape = inputs.info.layer, LayerShape.of(inputs)
        if shape not in self._of_shape:
            place = Position(At.RATES, layer, inputs.info.step)
            self._agreement.compare(place, inputs.ids.device)
            with errors_at(place):
                prices = measure(inputs, trial, shape, self._topology, self._comm)
            logger.info("rates of layer %d and all layers of its shape: %s", layer, prices)
            self._of_shape[shape] = prices
        self._of_layer[layer] = self._of_shape[shape]

    def config_for(self, inputs: Inputs, rows: int) -> BalanceConfig:
        """Return the config with the rates for these rows of all ranks, if it needs rates."""
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
        if (config, rates) not in self._configs:
            self._configs[config, rates] = replace(config, rates=rates)
        return self._configs[config, rates]

    def seconds(self, layer: int, rows_L: IntArray) -> float:
        """Return the predicted seconds of stage 6 of a layer; 0.0 if it was not measured."""
        prices = self._of_layer.get(layer)
        return 0.0 if prices is None else prices.seconds(rows_L)

    def _depends(self, config: BalanceConfig) -> bool:
        return self._topology.can_replicate and needs_rates(config)

    def known(self) -> dict[int, dict[int, dict[str, int]]]:
        """Return the measured rates as numbers: by layer and smallest number of rows."""
        return {
            layer: {rows: asdict(rates) for rows, rates in prices.steps}
            for layer, prices in sorted(self._of_layer.items())
        }

    def describe(self, config: BalanceConfig) -> str:
        """Return the objective for `repr(balancer)`."""
        if config.objective == "balance":
            return "objective 'balance'"
        if config.rates is not None:
            return f"objective 'time' ({config.rates})"
        lists = dict.fromkeys(self._of_layer.values())
        return f"objective 'time' ({' and '.join(map(str, lists)) or 'no rates yet'})"
