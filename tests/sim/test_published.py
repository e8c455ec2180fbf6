"""What was published, beside what the simulator says of it."""

from __future__ import annotations

from functools import cache

import pytest

from ultraep.tools.sim.model import load_model
from ultraep.tools.sim.published import (
    CONTENDERS,
    scenario_of,
    settings,
    share_of_ideal,
)
from ultraep.tools.sim.run import Result, simulate
from ultraep.tools.sim.serving import Serving
from ultraep.tools.sim.training import Training
from ultraep.tools.sim.workload import calibrated_noise

SETTINGS = {setting.name: setting for setting in settings()}
TRAIN = [name for name, setting in SETTINGS.items() if setting.training]


@cache
def results(name: str) -> list[Result]:
    """All contenders in one step of a setting."""
    return simulate(scenario_of(SETTINGS[name], steps=1), CONTENDERS)


def test_all_settings_can_be_read() -> None:
    assert list(SETTINGS) == [
        "glm-train",
        "qwen-train",
        "deepseek-train",
        "qwen-stem",
        "glm-stem",
        "qwen-mixed",
        "glm-mixed",
    ]
    assert TRAIN == ["glm-train", "qwen-train", "deepseek-train"]
    used = {name for name, setting in SETTINGS.items() if setting.use == "calibrate"}
    assert used == {"glm-train", "qwen-mixed"}
    assert {setting.use for setting in SETTINGS.values()} == {"calibrate", "hold back"}


@pytest.mark.parametrize("name", SETTINGS)
def test_published_figures_are_sound(name: str) -> None:
    setting = SETTINGS[name]
    assert setting.share("ideal") == 1
    assert all(0 < setting.share(policy) <= 1 for policy in setting.throughput)
    assert set(setting.imbalance) == set(setting.throughput) - {"ideal"}
    assert all(imbalance >= 1 for imbalance in setting.imbalance.values())
    assert max(setting.imbalance, key=setting.imbalance.__getitem__) == "none"
    assert load_model(setting.model).experts % setting.ranks == 0


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_a_scenario(name: str) -> None:
    setting = SETTINGS[name]
    scenario = scenario_of(setting, steps=3)
    assert scenario.ranks == setting.ranks
    assert scenario.cluster.name == "gb200-nvl72"
    if isinstance(scenario.job, Training):
        assert setting.training
        assert scenario.devices == 256
        assert scenario.job.simulated == 3 * setting.microbatches * setting.groups
        assert 0.2 < scenario.workload.noise <= calibrated_noise(training=True)  # type: ignore[attr-defined]
    else:
        assert isinstance(scenario.job, Serving)
        assert scenario.devices == setting.ranks
        assert scenario.job.requests.name == setting.requests


# A step of 256 devices, a few seconds each


@pytest.mark.parametrize("name", ["glm-train", "qwen-train"])
def test_shares_are_near_those_published(name: str) -> None:
    shares = share_of_ideal(results(name))
    for policy in ("none", "eplb", "lplb", "quota"):
        assert shares[policy] == pytest.approx(SETTINGS[name].share(policy), abs=0.05), policy


@pytest.mark.parametrize("name", ["glm-train", "qwen-train"])
def test_imbalance_is_near_that_published(name: str) -> None:
    setting = SETTINGS[name]
    for result in results(name):
        if result.policy in setting.imbalance:
            assert result.imbalance == pytest.approx(setting.imbalance[result.policy], rel=0.08)


@pytest.mark.parametrize("name", ["glm-train", "qwen-train"])
def test_policies_rank_as_published(name: str) -> None:
    published = SETTINGS[name].throughput
    found = {result.label: result.throughput for result in results(name)}
    order = sorted(published, key=published.__getitem__)
    assert sorted(published, key=found.__getitem__) == order
    assert found["quota"] < found["ultraep"] < found["ideal"]
