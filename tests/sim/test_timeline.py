"""The timeline and the plots have the figures of the simulation."""

import json
import re
import sys
from functools import cache

import pytest

from ultraep.errors import BackendUnavailable, ConfigError
from ultraep_tools.cli.scenario import ScenarioOptions, make_scenario
from ultraep_tools.cli.simulate import PARTS, check_plot, write_plot
from ultraep_tools.export import write_timeline
from ultraep_tools.sim.run import MAX_RANKS, make_timeline, simulate, time_layer
from ultraep_tools.sim.runtime import Contender

POLICIES = ("none", "eplb", "lplb", "quota", "ultraep", "ideal")
CONTENDERS = [Contender.of(policy) for policy in POLICIES]
MICROBATCH, LAYERS = 2, 3
SCENARIOS = {
    "training": {"steps": 1, "microbatches": 4},
    "no_recompute": {"steps": 1, "microbatches": 4, "no_recompute": True},
    "prefill": {"prefill": "stem"},
    "wide": {"steps": 1, "microbatches": 4, "ep": 32},
}


@cache
def scenario_of(name):
    sizes = {"cluster": "h200-nvl8", "model": "gpt-oss-20b", "ep": 8, "imbalance": 1.8}
    return make_scenario(ScenarioOptions(**sizes | SCENARIOS[name]), interval=4)


@cache
def timeline_of(name):
    return make_timeline(scenario_of(name), CONTENDERS, microbatch=MICROBATCH, layers=LAYERS)


def events_of(name):
    """Complete events by policy."""
    events = timeline_of(name)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    return {
        policy: [e for e in events if e["ph"] == "X" and e["pid"] == process]
        for process, policy in names.items()
    }


def end(event):
    return event["ts"] + event["dur"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_layers_last_as_long_as_in_the_simulation(name):
    scenario, events = scenario_of(name), events_of(name)
    assert list(events) == list(POLICIES)
    for layer in range(LAYERS):
        for policy, times in zip(POLICIES, time_layer(scenario, CONTENDERS, layer), strict=True):
            own = {e["name"]: e for e in events[policy] if e["tid"] == 0}
            passes = {"forward": times.forward_seconds}
            if times.backward:
                passes["backward"] = times.backward_seconds
            for direction, seconds_S in passes.items():
                whole = own[f"layer {layer} {direction}"]
                assert whole["dur"] == pytest.approx(1e6 * seconds_S[MICROBATCH])
                parts = [e for e in events[policy] if e["cat"] == whole["name"]]
                assert min(e["ts"] for e in parts) == pytest.approx(whole["ts"])
                assert max(map(end, parts)) <= end(whole) * (1 + 1e-12)
                if scenario.ranks <= MAX_RANKS:  # the busiest rank is drawn
                    assert max(map(end, parts)) == pytest.approx(end(whole))


def test_a_wide_group_shows_some_ranks_with_names(tmp_path):
    assert timeline_of("training")["otherData"]["ranks"] == "all 8"
    timeline = timeline_of("wide")
    assert timeline["otherData"]["ranks"].startswith("16 of 32 for each policy")
    write_timeline(tmp_path / "out.json", timeline)
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert len(named) == len(POLICIES) * (MAX_RANKS + 1)
    assert {event["ph"] for event in events} == {"X", "M"}
    assert all(e["dur"] > 0 <= e["ts"] for e in events if e["ph"] == "X")


PLOTTED = ("none", "echo=ultraep", "ultraep", "ideal")


@pytest.fixture(scope="module")
def results():
    options = ScenarioOptions(
        cluster="h200-nvl8", model="gpt-oss-20b", ep=8, steps=1, microbatches=2
    )
    return simulate(make_scenario(options, interval=4), PLOTTED)


def test_plots_hold_all_policies_and_load_nothing(results, tmp_path):
    shares = [f"{result.throughput / results[-1].throughput:.0%}" for result in results]
    for name in ("a.svg", "b.svg", "out.HTML"):
        write_plot(tmp_path / name, "the title", results, ideal=results[-1].throughput)
        content = (tmp_path / name).read_text("utf-8")
        for text in ("the title", *PLOTTED, *PARTS, *shares):
            assert f"<!-- {text}" in content
        assert not re.search(r"<(script|link|img)", content)
    assert content.startswith("<!doctype html>")
    assert content.count("<svg") == 1
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()


def test_unknown_formats_and_a_missing_package(monkeypatch):
    for name in ("out.pdf", "out", "png"):
        with pytest.raises(ConfigError, match=r"a plot must end in \.png, \.svg, \.html"):
            check_plot(name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendUnavailable, match=r"need matplotlib .*ultraep\[plot\]"):
        check_plot("a.png")
