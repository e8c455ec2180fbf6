"""Seconds, memory and throughput of scenarios do not change by accident: they are recorded.

When a change of the simulator is meant, write the file anew: `python -m sim.test_golden`, in
`tests`. The loads are integers, so that no library can change them.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ultraep_tools.sim.cluster import load_cluster
from ultraep_tools.sim.model import load_model
from ultraep_tools.sim.run import simulate
from ultraep_tools.sim.scenario import Scenario
from ultraep_tools.sim.serving import Serving
from ultraep_tools.sim.training import Training
from ultraep_tools.sim.workload import Recorded

from .small import gpt_oss

FILE = Path(__file__).parents[1] / "golden" / "simulator.json"
POLICIES = ["none", "eplb", "lplb", "quota", "echo", "ultraep", "ideal"]
TRAINING = {"tokens": 2048, "sequence": 1024, "microbatches": 4, "steps": 2}
SCENARIOS: dict[str, dict[str, Any]] = {
    "training": {},
    "no recompute": {"job": Training(**TRAINING, recompute=False)},
    "pipeline and groups": {"job": Training(**TRAINING, pipeline=2, groups=2)},
    "prefill": {"job": Serving(tokens=2048, sequence=1024, iterations=5)},
    "by time": {"objective": "time", "slots": 2, "tolerance": 0.0},
    "hybrid": {"domain": 4},
    "DeepSeek": {"model": replace(load_model("deepseek-v3-671b"), layers=5, dense_layers=1)},
}


def scenario_of(name: str) -> Scenario:
    changes = SCENARIOS[name]
    model = changes.get("model", gpt_oss(layers=4))
    numbers, layers, experts = np.indices((6, model.moe_layers, model.experts))
    loads = ((experts * 7919 + layers * 131) % 101 + 1) ** 2 // 50 + (numbers * 31 + experts) % 23
    settings: Any = {"cluster": load_cluster("h200-nvl8"), "model": model, "ranks": 8}
    settings |= {"workload": Recorded(loads, model.top_k), "job": Training(**TRAINING)}
    return Scenario(**settings | {"interval": 3} | changes)


def results(name: str) -> dict[str, Any]:
    numbers = {}
    for result in simulate(scenario_of(name), POLICIES):
        values = {key: getattr(result, key) for key in ("throughput", "imbalance", "copies")}
        values |= {f"memory of {key}": size for key, size in asdict(result.memory).items()}
        numbers[result.policy] = values | result.stages
    return numbers


@pytest.mark.parametrize("name", SCENARIOS)
def test_results_are_the_recorded_ones(name: str) -> None:
    actual = results(name)
    for policy, expected in json.loads(FILE.read_text())[name].items():
        assert actual[policy] == pytest.approx(expected, rel=1e-6), policy


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: results(name) for name in SCENARIOS}, indent=1) + "\n")
