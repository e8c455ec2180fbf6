"""Compute the constants of `src/ultraep_tools/sim/data/calibrated.toml` from published figures.

Every constant comes from one published setting, named in its `source`, in this order: the noise of
training loads from the imbalance with EPLB, the factor of the framework from the share without
balancing, and the costs of EPLB and LPLB per layer from their shares. Takes some minutes.

    python benchmarks/calibrate_sim.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from published import CONTENDERS, Setting, scenario_of, settings

from ultraep_tools.sim.costs import measured_rates
from ultraep_tools.sim.run import simulate
from ultraep_tools.sim.runtime import Contender, runtime_of

HALVINGS = 12
IDEAL = CONTENDERS[-1]
ROUNDED = 0.01  # published imbalances have two digits; take the smallest noise that fits


def bisect(value: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """The argument at which an increasing function reaches this value."""
    for _ in range(1 if "--toy" in sys.argv else HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) < wanted else (low, middle)
    return (low + high) / 2


def share(setting: Setting, contender: Contender, factor: float) -> float:
    rates = replace(measured_rates(), framework=factor)
    result, ideal = simulate(scenario_of(setting, rates=rates), [contender, IDEAL])
    return result.throughput / ideal.throughput


def noise_of(setting: Setting) -> float:
    def imbalance(noise: float) -> float:
        (eplb,) = simulate(scenario_of(setting, noise=noise, steps=1), [CONTENDERS[1]])
        return eplb.imbalance

    return bisect(imbalance, setting.imbalance["eplb"] - ROUNDED, 0.05, 1.0)


def cost_of(setting: Setting, contender: Contender, field: str, factor: float) -> float:
    """Microseconds per layer that explain the published share of a runtime."""

    def loss(us: float) -> float:
        values: Any = {field: us}
        runtime = replace(runtime_of(contender.policy), **values)
        return -share(setting, replace(contender, runtime=runtime), factor)

    return bisect(loss, -setting.share(contender.policy), 0.0, 6000.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--toy", action="store_true", help="one bisection step per constant, for CI"
    )
    parser.parse_args()
    by_name = {setting.name: setting for setting in settings()}
    none, eplb, lplb = CONTENDERS[:3]
    train = by_name["glm-train"]
    print(f"noise.training = {noise_of(train):.3f}", flush=True)
    factor = bisect(lambda factor: share(train, none, factor), train.share("none"), 1.0, 4.0)
    print(f"framework.factor = {factor:.3f}", flush=True)
    print(f"eplb.backward_us = {cost_of(train, eplb, 'backward_us', factor):.0f}", flush=True)
    print(f"lplb.layer_us = {cost_of(train, lplb, 'layer_us', factor):.0f}", flush=True)


if __name__ == "__main__":
    main()
