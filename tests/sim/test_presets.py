"""Clusters, models, and the TOML tables that they come from."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ultraep.errors import ConfigError
from ultraep_tools.sim.cluster import load_cluster
from ultraep_tools.sim.model import load_model
from ultraep_tools.sim.presets import presets

LOADERS: dict[str, Any] = {"clusters": load_cluster, "models": load_model}
MODEL, H200 = load_model("gpt-oss-20b"), load_cluster("h200-nvl8")
CLUSTER = """
[first]
title = "mine"
source = "me"
devices = 16
domain = 4
memory_gb = 80
matmul_tflops = 500.5
memory_gb_s = 2000
link_gb_s = 100
link_us = 2
network_gb_s = 25
network_us = 5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.toml"


@pytest.mark.parametrize(
    ("name", "billions", "active_billions"),
    [
        ("qwen3-235b", 235, 22),
        ("glm-4.5-106b", 106, 12),
        ("glm-4.7-358b", 353, 32),  # without the layer for multi-token prediction
        ("deepseek-v3-671b", 671, 37),
        ("gpt-oss-120b", 117, 5.1),
        ("gpt-oss-20b", 21, 3.6),
        ("kimi-k2", 1026, 32),
    ],
)
def test_presets_have_the_published_numbers_of_weights(
    name: str, billions: float, active_billions: float
) -> None:
    model = load_model(name)
    assert model.weights / 1e9 == pytest.approx(billions, rel=0.01)
    assert model.active_weights / 1e9 == pytest.approx(active_billions, rel=0.07)


@pytest.mark.parametrize(
    ("preset", "changes", "message"),
    [
        (MODEL, {"experts": 0}, "model gpt-oss-20b: experts must be at least 1, got 0"),
        (MODEL, {"layers": -1}, "model gpt-oss-20b: layers must be at least 1, got -1"),
        (MODEL, {"dense_layers": 24}, r"dense_layers must lie in 0\.\.23, got 24"),
        (MODEL, {"top_k": 33}, "top_k 33 is more than its 32 experts"),
        (H200, {"domain": 0}, "cluster h200-nvl8: domain must be at least 1, got 0"),
        (H200, {"link_gb_s": 0.0}, "link_gb_s must be positive, got 0"),
        (H200, {"memory_gb": -5.0}, "memory_gb must be positive, got -5"),
        (H200, {"matmul_tflops": float("inf")}, "matmul_tflops must be positive, got inf"),
        (H200, {"network_gb_s": float("nan")}, "network_gb_s must be positive, got nan"),
        (H200, {"link_us": -1.0}, "link_us must be at least 0, got -1"),
    ],
)
def test_invalid_sizes(preset: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(preset, **changes)


def test_all_presets_load() -> None:
    for kind, load in LOADERS.items():
        assert [load(name).name for name in presets(kind)] == list(presets(kind))


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("name", ["nothing-like-it", ""])
def test_an_unknown_name_lists_the_known_ones(kind: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown .* {name!r}; choose from .*, "):
        LOADERS[kind](name)


def test_a_file_gives_its_first_table_or_the_named_one(file: Path) -> None:
    file.write_text(CLUSTER + CLUSTER.replace("first", "second").replace("16", "32"))
    first = load_cluster(str(file))
    assert (first.name, first.matmul_tflops) == ("first", 500.5)
    assert load_cluster(f"{file}:first").devices == 16
    assert load_cluster(f"{file}:second").devices == 32
    with pytest.raises(ConfigError, match="unknown cluster 'secnd'; did you mean second"):
        load_cluster(f"{file}:secnd")


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("devices = 16", "devicess = 16", "unknown entry 'devicess'; did you mean devices?"),
        ("link_us = 2", "link_us = 2\nzzz = 1", "unknown entry 'zzz'; choose from name, title"),
        ("link_us = 2", "", "link_us missing"),
        ("devices = 16", "devices = 16.5", "devices must be of type int, got 16.5"),
        ("devices = 16", "devices = true", "devices must be of type int, got True"),
        ("link_us = 2", 'link_us = "2"', "link_us must be of type float, got '2'"),
        ('title = "mine"', "title = 3", "title must be of type str, got 3"),
    ],
)
def test_wrong_entries(file: Path, line: str, instead: str, message: str) -> None:
    file.write_text(CLUSTER.replace(line, instead))
    with pytest.raises(ConfigError, match=re.escape(f"cluster {file}: {message}")):
        load_cluster(str(file))
