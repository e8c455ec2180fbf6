"""Published figures next to the simulator's."""

from __future__ import annotations

from functools import cache

import pytest
from published import CONTENDERS, scenario_of, settings, share_of_ideal

from ultraep.tools.sim.run import Result, simulate

SETTINGS = {setting.name: setting for setting in settings()}
SIMULATED = ["glm-train", pytest.param("qwen-train", marks=pytest.mark.slow)]


@cache
def results(name: str) -> list[Result]:
    return simulate(scenario_of(SETTINGS[name], steps=1), CONTENDERS)


@pytest.mark.parametrize("name", SIMULATED)
def test_shares_imbalance_and_order_are_near_the_published(name: str) -> None:
    setting, shares = SETTINGS[name], share_of_ideal(results(name))
    for policy in ("none", "eplb", "lplb", "quota"):
        assert shares[policy] == pytest.approx(setting.share(policy), abs=0.05), policy
    for result in results(name):
        if result.policy in setting.imbalance:
            assert result.imbalance == pytest.approx(setting.imbalance[result.policy], rel=0.08)
    published = setting.throughput
    assert sorted(published, key=published.__getitem__) == sorted(published, key=shares.__getitem__)
    assert shares["quota"] < shares["ultraep"] < shares["ideal"]
