"""What the originals of the policies decided, case by case: ours decide the same.

`tests/golden/peers` holds cases of seeded loads as figures. Cases of recorded routing stay out of
the project: they are read from the folder that ULTRAEP_PEERS_GOLDEN names, or from
`shared/peers_golden` beside the checkout. On every tie the lower index comes first.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ultraep import BalanceConfig, Plan, Topology, plan
from ultraep.policies.peers import echo, eplb, flashlb, lplb

ROOT = Path(__file__).parents[2]
SEEDED = ROOT / "tests" / "golden" / "peers"
RECORDED = Path(os.environ.get("ULTRAEP_PEERS_GOLDEN", ROOT.parent / "shared" / "peers_golden"))


def cases(*planners: str) -> pytest.MarkDecorator:
    """Every case of these planners; one that is skipped stands for those that are not here."""
    found = []
    for planner in planners:
        seeded = json.loads((SEEDED / f"{planner}.json").read_text())
        assert seeded
        names = {case["name"] for case in seeded}
        found += [pytest.param(planner, case, id=f"{planner}-{case['name']}") for case in seeded]
        recorded = RECORDED / f"{planner}.json"
        if not recorded.is_file():
            missing = pytest.mark.skip(reason=f"no cases of recorded routing in {RECORDED}")
            found.append(pytest.param(planner, {}, id=f"{planner}-recorded", marks=missing))
            continue
        found += [
            pytest.param(planner, case, id=f"{planner}-{case['name']}")
            for case in json.loads(recorded.read_text())
            if case["name"] not in names
        ]
    return pytest.mark.parametrize(("planner", "case"), found)


def topology_of(case: Any) -> Topology:
    sizes = {name: case[name] for name in ("ranks", "experts", "slots", "domain")}
    return Topology(**sizes)


def planned(case: Any, policy: str, **settings: Any) -> Plan:
    """All tokens come from rank 0."""
    loads_RE = np.zeros((case["ranks"], case["experts"]), dtype=np.int64)
    loads_RE[0] = case["loads"]
    config = BalanceConfig(policy=policy, **settings)
    made = plan(loads_RE, topology_of(case), config, history=case.get("history"))
    made.check(loads_RE)
    return made


def copies_of(made: Plan) -> Any:
    return np.column_stack([made.replicas[:, :2], made.quotas]).tolist()


def settings_of(planner: str, parameters: Any) -> dict[str, Any]:
    """The parameters of an original as settings of ours."""
    if planner == "quota":
        return {"min_tokens_per_replica": parameters["floor"]}
    if planner == "llep":
        tolerance = parameters["alpha"] - 1
        return {"min_tokens_per_replica": parameters["floor"], "tolerance": tolerance}
    return {}


@cases("quota", "llep", "moonep")
def test_copies_are_those_of_the_original(planner: str, case: Any) -> None:
    made = planned(case, planner, **settings_of(planner, case["parameters"]))
    assert copies_of(made) == case["result"]["copies"]
    assert made.rank_loads.tolist() == case["result"]["rank_loads"]


@cases("echo")
def test_both_algorithms_of_echo_are_those_of_the_original(planner: str, case: Any) -> None:
    loads_E, homes_E = np.array(case["loads"]), topology_of(case).home_of_expert
    algorithm, threshold = case["parameters"]["algorithm"], case["parameters"]["threshold"]
    if algorithm == "bin_packing":
        copies = echo.bin_packing(loads_E, homes_E, case["ranks"])
    else:
        slots = {"slots": case["slots"], "threshold": threshold}
        copies = echo.one_shot(loads_E, homes_E, case["ranks"], **slots)
    assert sorted(copies.tolist()) == case["result"]["copies"]
    if (algorithm == "bin_packing") == (case["slots"] == 1):  # what the policy chooses, too
        made = planned(case, planner, tolerance=threshold)
        assert copies_of(made) == case["result"]["copies"]


@cases("eplb", "flashlb")
def test_places_are_those_of_the_original(planner: str, case: Any) -> None:
    """Shares are whole tokens here, so loads are within one token for every place of a rank."""
    history_E, topology = np.array(case["history"]), topology_of(case)
    if planner == "eplb":
        instances_ER = eplb.place_by_past(history_E, topology)
    else:
        settings = {name: case["parameters"][name] for name in ("depth", "width")}
        instances_ER = flashlb.search(history_E, topology, **settings)
    held = [np.repeat(np.arange(case["experts"]), column).tolist() for column in instances_ER.T]
    assert held == case["result"]["placement"]
    off_R = np.abs(planned(case, planner).rank_loads - case["result"]["rank_loads"])
    assert (off_R < [len(experts) for experts in held]).all()


@cases("lplb")
def test_homes_copies_and_peaks_are_those_of_the_original(planner: str, case: Any) -> None:
    """Of the split only the peak of every group: optimal splits are not unique."""
    history_E, topology, result = np.array(case["history"]), topology_of(case), case["result"]
    table, devices = (case["parameters"][name] for name in ("host_copies_from", "devices_per_node"))
    places = lplb.place_on_graph(history_E, topology, table, devices_per_node=devices)
    for rank, experts in enumerate(result["homes"]):  # there ordered by past load
        assert np.flatnonzero(places.home_of_expert == rank).tolist() == sorted(experts)
    host_X = places.host[places.edge]
    assert sorted(np.column_stack([places.expert, host_X]).tolist()) == result["copies"]
    loads_E = np.array(case["loads"])
    moved_X = lplb.split(loads_E[None], places, topology)[0]
    rank_R = np.zeros(topology.ranks, dtype=np.int64)
    np.add.at(rank_R, places.home_of_expert, loads_E)
    np.subtract.at(rank_R, places.home_of_expert[places.expert], moved_X)
    np.add.at(rank_R, host_X, moved_X)
    peaks = rank_R.reshape(topology.num_domains, -1).max(axis=1).tolist()
    assert peaks == result["whole_peak_of_group"]
    if lplb.graph_of(topology.domain_size, topology.slots) == table:
        assert planned(case, planner).rank_loads.tolist() == rank_R.tolist()


@cases("lplb")
def test_graphs_are_those_of_the_original(planner: str, case: Any) -> None:
    name, size = case["parameters"]["graph"], case["domain"]
    table = {
        "cube8": lplb.CUBE,
        "hypercube16": lplb.HYPERCUBE,
        f"ring{size}": lplb.graph_of(size, 1),
    }
    if name.startswith("torus"):
        table[name] = lplb.torus(*map(int, name.removeprefix("torus").split("x")))
    assert table[name] == case["parameters"]["host_copies_from"]
