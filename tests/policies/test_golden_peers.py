"""The reimplemented policies decide like the original planners, case by case.

`tests/golden/peers` holds cases with seeded loads. Cases with recorded routing are not part of the
project: they are read from the folder in ULTRAEP_PEERS_GOLDEN, or from `shared/peers_golden` beside
the checkout. Ties go to the lower index.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ultraep import BalanceConfig, Plan, Topology, plan
from ultraep_tools.baselines import eplb, lplb

ROOT = Path(__file__).parents[2]
SEEDED = ROOT / "tests" / "golden" / "peers"
RECORDED = Path(os.environ.get("ULTRAEP_PEERS_GOLDEN", ROOT.parent / "shared" / "peers_golden"))


def cases(*planners: str) -> pytest.MarkDecorator:
    """All cases of these planners. If recorded cases are missing, one skipped case says so."""
    params = []
    for planner in planners:
        by_name = {}
        for folder in (RECORDED, SEEDED):
            path = folder / f"{planner}.json"
            if folder == SEEDED or path.is_file():
                by_name |= {case["name"]: case for case in json.loads(path.read_text())}
        params += [pytest.param(planner, case, id=f"{planner}-{n}") for n, case in by_name.items()]
        if not (RECORDED / f"{planner}.json").is_file():
            missing = pytest.mark.skip(reason=f"no cases of recorded routing in {RECORDED}")
            params.append(pytest.param(planner, {}, id=f"{planner}-recorded", marks=missing))
    return pytest.mark.parametrize(("planner", "case"), params)


def topology_of(case: Any) -> Topology:
    sizes = {name: case[name] for name in ("ranks", "experts", "slots", "domain")}
    return Topology(**sizes)


def planned(case: Any, policy: str, **settings: Any) -> Plan:
    """All rows come from rank 0."""
    loads_RE = np.zeros((case["ranks"], case["experts"]), dtype=np.int64)
    loads_RE[0] = case["loads"]
    config = BalanceConfig(policy=policy, **settings)
    result = plan(loads_RE, topology_of(case), config, history=case.get("history"))
    result.check(loads_RE)
    return result


def replicas_of(result: Plan) -> Any:
    return np.column_stack([result.replicas[:, :2], result.quotas]).tolist()


@cases("quota")
def test_replicas_equal_the_original(planner: str, case: Any) -> None:
    floor = case["parameters"]["floor"]
    result = planned(case, planner, min_tokens_per_replica=floor)
    assert replicas_of(result) == case["result"]["copies"]
    assert result.rank_loads.tolist() == case["result"]["rank_loads"]


@cases("eplb")
def test_placements_equal_the_original(planner: str, case: Any) -> None:
    """Shares are whole rows here, so loads differ by less than one row per place of a rank."""
    instances_ER = eplb.place_by_past(np.array(case["history"]), topology_of(case))
    held = [np.repeat(np.arange(case["experts"]), column).tolist() for column in instances_ER.T]
    assert held == case["result"]["placement"]
    off_R = np.abs(planned(case, planner).rank_loads - case["result"]["rank_loads"])
    assert (off_R < [len(experts) for experts in held]).all()


@cases("lplb")
def test_graphs_homes_replicas_and_peaks_equal_the_original(planner: str, case: Any) -> None:
    """Optimal splits are not unique, so only the peak of every group is compared."""
    history_E, topology, result = np.array(case["history"]), topology_of(case), case["result"]
    table, devices = (case["parameters"][name] for name in ("host_copies_from", "devices_per_node"))
    graph = case["parameters"]["graph"]
    if graph.startswith("ring"):
        assert lplb.graph_of(case["domain"], 1) == table
    if graph.startswith("torus"):
        assert lplb.torus(*map(int, graph.removeprefix("torus").split("x"))) == table
    places = lplb.place_on_graph(history_E, topology, table, devices_per_node=devices)
    for rank, experts in enumerate(result["homes"]):  # sorted by past load there
        assert np.flatnonzero(places.home_of_expert == rank).tolist() == sorted(experts)
    host_X = places.host[places.edge]
    assert sorted(np.column_stack([places.expert, host_X]).tolist()) == result["copies"]
    loads_E = np.array(case["loads"])
    moved_X = lplb.split(loads_E, places, topology)
    rank_R = np.zeros(topology.ranks, dtype=np.int64)
    np.add.at(rank_R, places.home_of_expert, loads_E)
    np.subtract.at(rank_R, places.home_of_expert[places.expert], moved_X)
    np.add.at(rank_R, host_X, moved_X)
    peaks = rank_R.reshape(topology.num_domains, -1).max(axis=1).tolist()
    assert peaks == result["whole_peak_of_group"]
    if lplb.graph_of(topology.domain_size, topology.slots) == table:
        assert planned(case, planner).rank_loads.tolist() == rank_R.tolist()
