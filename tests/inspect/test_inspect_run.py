"""An inspection: its trace replays, its numbers are those of the trace, the report draws them."""

import json
import re

import numpy as np
import pytest
import torch
from browser import chromium
from demo.test_report import Parts, dump_dom, embedded
from inspect_models import TEXTS, routing_of
from torch import nn

from ultraep.errors import ConfigError, FileError
from ultraep.tools.inspect.anatomy import Anatomy
from ultraep.tools.inspect.findings import label
from ultraep.tools.inspect.options import InspectOptions
from ultraep.tools.inspect.preset import write_preset
from ultraep.tools.inspect.report import write_report
from ultraep.tools.inspect.run import Inspection, claim_folder, topology_of
from ultraep.tools.sim.model import load_model
from ultraep.tools.sim.workload import read_workload
from ultraep.trace.read import read_trace
from ultraep.trace.replay import cases, differing, replay

pytest.importorskip("transformers")
SETTINGS = {"tokens": 192, "window": 64, "sequence": 16, "sizes": (4, 8), "device": "cpu"}


def quiet(*_):
    """Tell nobody."""


class Done:
    """A finished inspection, and all that it left."""

    def __init__(self, out, **asked):
        self.out, self.inspection = out, Inspection(InspectOptions(**(SETTINGS | asked)))
        with claim_folder(out) as claim:
            with self.inspection, routing_of(self.inspection.opened.model) as self.ids:
                self.caught = self.inspection.record(claim, quiet)
            self.findings = self.inspection.findings(claim, quiet)
        self.trace = read_trace(out / "trace")
        self.result = self.inspection.result(self.caught, self.findings, 1.5)


@pytest.fixture(scope="module")
def done(checkpoint, text_files, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    return Done(out, model=checkpoint, files=tuple(text_files))


# -- the trace -----------------------------------------------------------------------------------


def test_the_trace_holds_what_the_routers_decided(done):
    trace, windows = done.trace, 3 * len(TEXTS)
    assert (trace.header.ranks, trace.header.experts, trace.header.slots) == (1, 16, 1)
    assert len(trace) == 4 * windows == done.caught.records
    assert trace.dropped == trace.left_out == 0
    for number, (name, ids) in enumerate(done.ids.items()):
        assert name == f"model.layers.{number}.mlp.experts"
        own = trace.of_layer(number)
        assert own.step.tolist() == list(range(windows))
        for window, chosen in enumerate(ids.split(64)):
            expected = np.bincount(chosen.reshape(-1), minlength=16)
            assert own.loads[window, 0].tolist() == expected.tolist()
            assert own.slot_rows[window].tolist() == [*expected, 0]
    assert "letters 0 to 2, numbers 3 to 5" in trace.header.note


def test_the_trace_replays_as_it_was_recorded(done):
    assert differing(done.trace) == []


def test_the_trace_and_the_sizes_are_a_workload_of_the_simulator(done):
    write_preset(done.out / "model.toml", done.inspection, done.caught.top_k)
    model = load_model(str(done.out / "model.toml"))
    assert (model.experts, model.top_k, model.layers, model.dense_layers) == (16, 8, 4, 0)
    assert (model.width, model.expert_width, model.shared_width) == (128, 64, 0)
    found = read_workload(done.out / "trace", experts=model.experts, top_k=model.top_k)
    assert found.loads.shape == (6, 4, 16)


@pytest.mark.parametrize(
    ("family", "shared", "dense"),
    [("qwen2_moe", 64, 0), ("deepseek_v3", 64, 128), ("glm4_moe", 64, 128)],
)
def test_sizes_beside_the_experts(family, shared, dense, tmp_path):
    inspection = Inspection(
        InspectOptions(family=family, device="cpu", tokens=8, sequence=8, sizes=(2,))
    )
    write_preset(tmp_path / "model.toml", inspection, 8)
    model = load_model(str(tmp_path / "model.toml"))
    assert (model.shared_width, model.dense_width) == (shared, dense)
    assert model.dense_layers == (1 if dense else 0)
    counted = sum(p.numel() for p in inspection.opened.model.parameters())
    assert model.weights == pytest.approx(counted, rel=0.02)


# -- the numbers ---------------------------------------------------------------------------------


def test_rows_are_replays_of_the_trace(done):
    labels = [(row.policy, row.ranks, row.slots) for row in done.result.rows]
    of_size = [("none", 1), *((name, n) for name in ("eplb", "quota", "ultraep") for n in (1, 2))]
    assert labels == [(name, ranks, slots) for ranks in (4, 8) for name, slots in of_size]
    for row in done.result.rows:
        (case,) = cases(
            done.trace, policies=[row.policy], slots=[row.slots], ranks=[row.ranks], history=[1]
        )
        line = replay(done.trace, case)
        assert (row.before, row.after, row.after_worst) == (line.before, line.after, line.worst)
        assert (row.copies, row.remote, row.beyond) == (line.copies, line.remote, line.beyond)


def test_the_result_is_saved(done):
    content = json.loads(done.result.save(done.out).read_text())
    assert content["family"] == "qwen3_moe"
    assert (content["experts"], content["top_k"], content["layers"]) == (16, 8, [0, 1, 2, 3])
    assert content["rows"][0]["policy"] == "none"
    assert not content["notes"]


def test_one_size_need_not_divide_the_experts(tmp_path):
    done = Done(tmp_path, family="qwen2_moe", sizes=(8, 7), policies=("ultraep",), slots=(1,))
    assert done.trace.header.experts == 60
    assert [row.ranks for row in done.result.rows] == [8, 7]
    assert all(row.after <= row.before for row in done.result.rows)
    assert differing(done.trace) == []


def test_only_some_layers(checkpoint, tmp_path):
    done = Done(tmp_path, model=checkpoint, layers=(0, 2), policies=("none",), slots=(0,))
    assert done.trace.layers.tolist() == [0, 2]
    assert list(done.ids) == [f"model.layers.{number}.mlp.experts" for number in range(3)]
    assert (
        done.inspection.estimate.read
        < Inspection(InspectOptions(model=checkpoint, **SETTINGS)).estimate.read
    )


# -- what is refused -----------------------------------------------------------------------------

REFUSED = {
    "nothing": ({}, "name the directory of a model, or a family with --random"),
    "policy": ({"family": "mixtral", "policies": ("best",)}, "unknown policy 'best'"),
    "ranks": ({"family": "mixtral", "sizes": (8, 16)}, "--ep 16: .* no more than the 8 experts"),
    "slots": ({"family": "mixtral", "slots": (9,)}, "slots must lie between 0 and 8, got 9"),
    "layers": ({"family": "mixtral", "layers": (1, 9)}, "--layers 9: layers with experts are 0, 1"),
    "device": ({"family": "mixtral", "device": "abacus"}, "--device is cpu, cuda or cuda:0"),
    "type": ({"family": "mixtral", "dtype": "int4"}, "--dtype is one of float32"),
    "history": ({"family": "mixtral", "history": 0}, "--history must be at least 1, got 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_settings_are_refused(name):
    settings, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        Inspection(InspectOptions(**({"sizes": (4,), "device": "cpu"} | settings)))


def test_layers_with_other_numbers_of_experts_are_refused():
    experts = {n: nn.ParameterList([nn.Parameter(torch.zeros(4 + n, 2))]) for n in range(2)}
    anatomy = Anatomy(nn.Module(), {}, experts, {0: "a", 1: "b"})
    with pytest.raises(ConfigError, match="layer 0 has 4 experts, layer 1 has 5"):
        topology_of(anatomy, slots=1, sizes=[2])
    assert topology_of(anatomy.only([1]), slots=1, sizes=[5]).experts == 5


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(FileError, match="exists, but not as output of an earlier inspection"):
        claim_folder(tmp_path)
    assert (tmp_path / "report.html").read_text() == "mine"


# -- the report ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(done):
    pytest.importorskip("plotly")
    return write_report(done.out, done.result, done.findings).read_text("utf-8")


def test_numbers_of_the_page_are_those_of_the_trace(done, page):
    found, one = done.findings, done.findings.shown
    sizes, layers, texts = (embedded(page, name) for name in ("sizes", "layers", "texts"))
    assert sizes["sizes"] == layers["sizes"] == [4, 8]
    for row in done.result.rows:
        slots = "" if row.policy == "none" else f" with {row.slots} slot{'s' * (row.slots > 1)}"
        place = sizes["sizes"].index(row.ranks)
        assert sizes["mean"][row.policy + slots][place] == pytest.approx(row.after, abs=1e-6)
        assert sizes["worst"][row.policy + slots][place] == pytest.approx(row.after_worst, abs=1e-6)
    name = label(one.case)
    assert name == "ultraep with 1 slot"
    for layer in layers["names"]:
        own = one.after[done.trace.layer == layer]
        assert layers["mean"][0][name][layer] == pytest.approx(own.mean(), abs=1e-6)
        assert layers["worst"][0]["none"][layer] == pytest.approx(
            one.before[done.trace.layer == layer].max(), abs=1e-6
        )
    assert texts["names"] == list(TEXTS)
    for place, text in enumerate(texts["names"]):
        own = one.before[found.text == text].mean()
        assert texts["mean"][0]["none"][place] == pytest.approx(own, abs=1e-6)


def test_the_past_is_told_apart_by_text(done, page):
    found = embedded(page, "history")
    eplb = next(one for one in done.findings.of_size(4) if one.case.config.policy == "eplb")
    step, name = done.trace.step, label(eplb.case)
    same, changed = np.isin(step, [1, 2, 4, 5]), step == 3
    assert found["same"][name][0] == pytest.approx(eplb.after[same].mean(), abs=1e-6)
    assert found["changed"][name][0] == pytest.approx(eplb.after[changed].mean(), abs=1e-6)
    head, rows = done.findings.past_table()
    assert head[3] == "after a change of text"
    assert rows[0] == [
        *(name, "1 window", f"{eplb.after[same].mean():.3f}", f"{eplb.after[changed].mean():.3f}")
    ]


def test_popular_experts_are_those_of_the_trace(done, page):
    found = embedded(page, "experts")
    assert found["texts"] == ["all texts", *TEXTS]
    own = done.trace.loads[(done.trace.layer == 2) & (done.trace.step < 3)].sum(axis=(0, 1))
    np.testing.assert_allclose(found["load"][1][2], own / own.mean(), atol=1e-3)


def test_the_page_loads_nothing(done, page):
    parts = Parts()
    parts.feed(page)
    assert all(url.startswith("data:") for url in parts.loaded)
    assert "default-src 'none'" in page
    assert f"<h1>small: {done.findings.headline}</h1>".replace("->", "-&gt;") in page
    assert "letters (192 tokens), numbers (192 tokens); windows of 64 tokens" in page


def test_no_past_is_enough(tmp_path):
    small = Done(tmp_path, family="mixtral", policies=("none",), slots=(1,), sizes=(4,))
    pytest.importorskip("plotly")
    page = write_report(small.out, small.result, small.findings).read_text("utf-8")
    assert "plot-sizes" in page
    assert "plot-history" not in page
    assert "weights are random" in page


@pytest.mark.skipif(chromium() is None, reason="no Chromium here")
def test_a_browser_draws_all_plots_without_complaint(done, page, tmp_path):
    """Then it chooses other sizes, another text and another window, as a user would."""
    choose = """<script>
    for (const [id, value] of Object.entries({
      "choice-layers": 1, "choice-texts": 1, "choice-experts": 2, "moment": 4, "layer": 1,
    })) {
      document.getElementById(id).value = value;
      document.getElementById(id).dispatchEvent(new Event("input"));
    }
    </script></body>"""
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", choose), "utf-8")
    shown = dump_dom(path, tmp_path / "home")
    assert "CONSOLE" not in shown.stderr, shown.stderr
    for plot in ("sizes", "layers", "texts", "history", "experts", "microbatches"):
        drawn = shown.stdout.split(f'id="plot-{plot}"')[1].split("</section>")[0]
        assert 'class="main-svg"' in drawn, plot
    told = re.search(r'id="told"[^>]*>(.*?)</p>', shown.stdout)[1]
    record = (done.trace.step == 4) & (done.trace.layer == 1)
    one = done.findings.shown
    assert told.startswith("Window 4 (numbers), layer 1: imbalance ")
    assert f"{one.before[record][0]:.3f} without replicas, {one.after[record][0]:.3f} with." in told
