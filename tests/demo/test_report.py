"""The report: its numbers match the trace, it loads nothing, and a browser draws it."""

import json
import re
import shutil
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from browser import Browser, chromium
from cli.test_demo import RESULT
from traces import record

import ultraep
from ultraep import FileError, Topology, read_trace
from ultraep.workload import zipf
from ultraep_tools.demo.result import trace_folder, write_report
from ultraep_tools.demo.sizes import Sizes

pytest.importorskip("plotly")

RANKS, EXPERTS, SLOTS, LAYERS, STEPS = 4, 12, 1, 2, 12
TOPOLOGY = Topology(ranks=RANKS, experts=EXPERTS, slots=SLOTS)
POLICIES = ("none", "ultraep")
PLOTS = ("imbalance", "requests", "speed", "loss", "layers", "microbatches", "copies", "replay")
DOMAINS = ["code"] * 4 + ["prose"] * 4 + ["tables & <b>"] * 4


def record_training(folder, policy):
    """Record all steps and one more, the check at the end."""
    config, plans = ultraep.BalanceConfig(policy=policy), []
    for step, layer in product(range(STEPS + 1), range(LAYERS)):
        loads = zipf(RANKS, EXPERTS, ratio=2.0, top_k=2, tokens=300, seed=layer)
        loads = np.roll(loads, step // 4 * 5, axis=1)  # another domain every fourth step
        plans.append(ultraep.plan(loads + step % 3, TOPOLOGY, config))
    options = {"bytes_moved": lambda plan, rank: 1000 * plan.num_replicas + rank}
    record(folder, plans, topology=TOPOLOGY, config=config, layers=LAYERS, **options)


def policy_result(policy, **changes):
    values = {
        "losses": [5.0 - step / 10 for step in range(STEPS)],
        "seconds": [0.5 + step / 100 for step in range(STEPS)],
        "first_token_p90": 1.25,
    }
    return replace(RESULT.policies[1], policy=policy, **(values | changes))


def demo_result(**changes):
    values = {
        "sizes": Sizes(ranks=RANKS, experts=EXPERTS, slots=SLOTS, layers=LAYERS, tokens=300),
        "steps": STEPS,
        "domains": DOMAINS,
        "notes": ["a note with <i>signs</i>"],
        "policies": [policy_result(policy) for policy in POLICIES],
    }
    return replace(RESULT, **(values | changes))


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    for policy in POLICIES:
        record_training(trace_folder(out, policy), policy)
    return out


@pytest.fixture(scope="module")
def report(demo):
    return write_report(demo, demo_result())


@pytest.fixture(scope="module")
def page(report):
    return report.read_text("utf-8")


@pytest.fixture
def copy(demo, tmp_path):
    return shutil.copytree(demo, tmp_path / "demo")


@pytest.fixture(scope="module")
def trace(demo):
    whole = read_trace(trace_folder(demo, "ultraep"))
    return whole.take(np.flatnonzero(whole.step < STEPS))


def embedded(page, name):
    match = re.search(rf'<script type="application/json" id="numbers-{name}">(.*?)</script>', page)
    return json.loads(match[1])


def by_step(trace, values, fold):
    return [fold(values[trace.step == step]) for step in trace.steps]


def test_plots_by_step_and_layer_match_the_trace(page, trace):
    imbalance, layers, copies = (embedded(page, n) for n in ("imbalance", "layers", "copies"))
    assert imbalance["step"] == list(range(STEPS))
    for key, values in (("before", trace.imbalance_before), ("after", trace.imbalance_after)):
        for name, fold in (("mean", np.mean), ("min", np.min), ("max", np.max)):
            expected = by_step(trace, values, fold)
            np.testing.assert_allclose(imbalance[key][name], expected, atol=1e-6)
        for layer in range(LAYERS):
            own = values[trace.layer == layer]
            assert layers[key][layer] == pytest.approx(own.mean(), abs=1e-6)
            assert layers[f"{key}_worst"][layer] == pytest.approx(own.max(), abs=1e-6)
    assert [domain["name"] for domain in imbalance["domains"]] == list(dict.fromkeys(DOMAINS))
    assert [(d["begin"], d["end"]) for d in imbalance["domains"]] == [(0, 3), (4, 7), (8, 11)]
    assert copies["copies"]["mean"] == by_step(trace, trace.num_copies, np.mean)
    assert copies["bytes"] == by_step(trace, trace.bytes_moved, np.sum)


def test_microbatches_match_the_trace(page, trace):
    plot = embedded(page, "microbatches")
    assert len(plot["records"]) == plot["recorded"] == STEPS
    for n in range(len(trace)):
        shown = plot["records"][trace.step[n]][trace.layer[n]]
        plan = trace.plan(n)
        assert shown["loads"] == plan.loads.sum(axis=0).tolist()
        assert shown["rows"] == trace.slot_rows[n].tolist()
        held = {(expert, rank) for rank, expert in enumerate(shown["held"]) if expert >= 0}
        assert held == {(expert, host) for expert, host, _ in plan.replicas.tolist()}
    moment, layer = plot["worst"]
    worst = trace.imbalance_before.argmax()
    assert (trace.step[worst], trace.layer[worst]) == (plot["moments"][moment]["step"], layer)
    assert plot["homes"] == [TOPOLOGY.home_experts(rank).tolist() for rank in range(RANKS)]


def test_the_page_has_all_sections_and_loads_nothing(page, report):
    assert "default-src 'none'" in page
    for plot in PLOTS:
        for name in (f"plot-{plot}", f"numbers-{plot}"):
            assert page.count(f'id="{name}"') == 1
    assert report.stat().st_size < 8e6


@pytest.mark.parametrize(
    ("folder", "message"),
    [("ultraep", "no such file or folder"), ("ultraep/trace/rank-00001", "no record of the trai")],
)
def test_a_missing_trace_is_an_error(copy, folder, message):
    shutil.rmtree(copy / folder)
    with pytest.raises(FileError, match=message):
        write_report(copy, demo_result())


SELECT = """for (const [id, value] of [["moment", 5], ["layer", 1]]) {
  document.getElementById(id).value = value;
  document.getElementById(id).dispatchEvent(new Event("input"));
}"""


@pytest.mark.skipif(chromium() is None, reason="no Chromium here")
def test_a_browser_draws_all_plots_on_a_phone(report, page, tmp_path):
    """Then select another microbatch, as a user would."""
    with Browser(tmp_path / "home") as browser:
        browser.look(width=400, height=800)
        browser.open(report.as_uri())
        for plot in PLOTS:
            browser.wait(f"document.querySelectorAll('#plot-{plot} .main-svg').length")
        assert browser.run("document.documentElement.scrollWidth") <= 400
        browser.run(SELECT)
        text = browser.text("description")
        assert browser.messages == []
    selected = embedded(page, "microbatches")["records"][5][1]
    ranks = np.array(selected["rows"]).reshape(RANKS, -1).sum(axis=1)
    assert text.startswith("Step 5 (prose), layer 1: imbalance ")
    assert f", {ranks.max() / ranks.mean():.3f} with." in text
