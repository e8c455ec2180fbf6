"""The timeline: its figures are those of the simulation, its form is that of Chrome's tracing."""

import json
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from ultraep.errors import ConfigError
from ultraep.tools.cli.options import ScenarioOptions
from ultraep.tools.cli.scenario import make_scenario
from ultraep.tools.sim.run import plan_and_clock, time_layer
from ultraep.tools.sim.scenario import Contender
from ultraep.tools.sim.timeline import MOST_RANKS, make_timeline, median_microbatch, simulated_trace
from ultraep.trace.export import stages, write_timeline
from ultraep.trace.schema import SIMULATED, STAGES, fields_in_file

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


@pytest.fixture(params=SCENARIOS)
def scenario(request):
    return scenario_of(request.param)


@pytest.fixture
def training():
    return scenario_of("training")


def drawn(scenario, layers=LAYERS):
    return make_timeline(scenario, CONTENDERS, microbatch=MICROBATCH, layers=layers)


def by_process(timeline):
    """Complete events of every policy."""
    names = {e["pid"]: e["args"]["name"] for e in timeline["traceEvents"] if is_name(e)}
    events = {name: [] for name in names.values()}
    for event in timeline["traceEvents"]:
        if event["ph"] == "X":
            events[names[event["pid"]]].append(event)
    return events


def is_name(event):
    return event["name"] == "process_name"


def end(event):
    return event["ts"] + event["dur"]


def test_layers_last_as_long_as_in_the_simulation(scenario):
    events = by_process(drawn(scenario))
    assert list(events) == list(POLICIES)
    for layer in range(LAYERS):
        for policy, times in zip(POLICIES, time_layer(scenario, CONTENDERS, layer), strict=True):
            own = {e["name"]: e for e in events[policy] if e["tid"] == 0}
            passes = {"forward": times.forward_seconds}
            if times.backward:
                passes["backward"] = times.backward_seconds
            for way, seconds_S in passes.items():
                whole = own[f"layer {layer} {way}"]
                assert whole["dur"] == pytest.approx(1e6 * seconds_S[MICROBATCH])
                stages = [e for e in events[policy] if e["cat"] == whole["name"]]
                assert min(e["ts"] for e in stages) == pytest.approx(whole["ts"])
                assert max(map(end, stages)) <= end(whole) * (1 + 1e-12)
                if scenario.ranks <= MOST_RANKS:  # the busiest rank is there
                    assert max(map(end, stages)) == pytest.approx(end(whole))


def test_passes_follow_each_other(training):
    for own in by_process(drawn(training)).values():
        passes = [event for event in own if event["tid"] == 0]
        names = [event["name"] for event in passes]
        assert names[:LAYERS] == [f"layer {n} forward" for n in range(LAYERS)]
        assert names[LAYERS:] == [f"layer {n} backward" for n in reversed(range(LAYERS))]
        assert passes[0]["ts"] == 0
        for before, after in pairwise(passes):
            assert after["ts"] == pytest.approx(end(before))


def test_ranks_wait_for_the_busiest_between_experts_and_combine(scenario):
    for policy, own in by_process(drawn(scenario)).items():
        first = [e for e in own if e["cat"] == "layer 0 forward"]
        ends = np.array([end(e) for e in first if e["name"] == "experts"])
        (begin,) = {e["ts"] for e in first if e["name"] == "combine"}
        gaps = begin - ends
        assert gaps.min() == pytest.approx(0, abs=1e-6 * begin)  # the busiest is always drawn
        waiting = gaps.max() / begin
        if policy in ("none", "ideal"):
            assert (waiting > 0.1) == (policy == "none")


def test_a_rank_does_one_thing_at_a_time(scenario):
    for own in by_process(drawn(scenario)).values():
        for thread in {event["tid"] for event in own}:
            mine = sorted((e["ts"], end(e)) for e in own if e["tid"] == thread)
            for (_, stop), (start, _) in pairwise(mine):
                assert start >= stop - 1e-6


def test_few_ranks_are_drawn_of_many_and_it_says_so(training):
    timeline = drawn(scenario_of("wide"))
    assert timeline["otherData"]["ranks"].startswith("16 of 32 for each policy")
    for own in by_process(timeline).values():
        assert len({event["tid"] for event in own}) == MOST_RANKS + 1
    assert drawn(training)["otherData"]["ranks"] == "all 8"


def test_everything_has_a_name_and_the_file_is_json(tmp_path):
    timeline = drawn(scenario_of("wide"))
    path = tmp_path / "out.json"
    write_timeline(path, timeline)
    events = json.loads(path.read_text())["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert named == used
    for event in events:
        assert event["ph"] in ("X", "M")
        if event["ph"] == "X":
            assert event["dur"] > 0 <= event["ts"]


def test_what_is_drawn_are_records_of_the_schema(training):
    layers = np.arange(2)
    clocked = [next(plan_and_clock(training, CONTENDERS[:1], layer)) for layer in layers.tolist()]
    trace = simulated_trace(CONTENDERS[0], clocked, layers, MICROBATCH)
    sizes, fields = trace.header.sizes() | {"N": 2}, fields_in_file()
    for name, array in trace.arrays.items():
        assert array.shape == tuple(sizes[letter] for letter in fields[name].shape)
        assert array.dtype.kind == np.dtype(fields[name].dtype).kind
    assert trace.header.stages[1:-1] == STAGES
    assert (trace.waited <= trace.seconds).all()
    assert trace.waited.min() >= 0
    drawn = {event["name"] for event in stages(trace, range(8), process=1)}
    assert {"recompute", "experts back", "attention back"} < drawn <= set(SIMULATED)


def test_the_median_microbatch():
    assert median_microbatch(np.array([5.0, 1.0, 3.0])) == 2
    assert median_microbatch(np.array([5.0, 1.0, 3.0, 4.0])) == 2
    assert median_microbatch(np.array([7.0])) == 0


def test_a_timeline_needs_a_layer(training):
    with pytest.raises(ConfigError, match="at least one layer, got 0"):
        drawn(training, layers=0)
