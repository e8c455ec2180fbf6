"""Plans do not change by accident: their digests are recorded.

When a change of the planner is meant, write the file anew: `python tests/test_golden.py`.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import ultraep

FILE = Path(__file__).parent / "golden" / "plans.json"
SETTINGS = {"exact": ultraep.BalanceConfig(), "one_percent": ultraep.BalanceConfig(tolerance=0.01)}


TOPOLOGIES = {
    "ep8": ultraep.Topology(ranks=8, experts=32, slots=1),
    "ep16_two_slots": ultraep.Topology(ranks=16, experts=32, slots=2),
    "ep64": ultraep.Topology(ranks=64, experts=256, slots=1),
    "domains": ultraep.Topology(ranks=12, experts=48, slots=1, domain=4),
    "uneven_homes": ultraep.Topology(ranks=3, experts=7, slots=1, homes=[2, 0, 1, 0, 0, 2, 0]),
}


def loads_of(topology: ultraep.Topology) -> np.ndarray:
    """Skewed loads from integer arithmetic alone, so that no library can change them."""
    sources, experts = np.indices((topology.ranks, topology.experts))
    popularity = (experts * 7919 + 17) % 101 + 1
    return popularity**3 // 400 + (sources * 31 + experts * 57) % 23


def digests(backend: str) -> dict[str, str]:
    return {
        f"{name}/{setting}": ultraep.plan(
            loads_of(topology), topology, config, backend=backend
        ).digest()
        for name, topology in TOPOLOGIES.items()
        for setting, config in SETTINGS.items()
    }


@pytest.mark.parametrize("backend", ultraep.backend_names())
def test_plans_are_the_recorded_ones(backend):
    assert digests(backend) == json.loads(FILE.read_text())


if __name__ == "__main__":
    FILE.write_text(json.dumps(digests("reference"), indent=1) + "\n")
