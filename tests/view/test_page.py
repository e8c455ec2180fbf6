"""The page in a real browser: every view, clicks, and the numbers that it shows."""

import html
import json
import re
import shutil

import numpy as np
import pytest
from browser import browse, chromium

from ultraep.trace.schema import COST
from ultraep_tools.view.api import write_page
from ultraep_tools.view.catalogue import Catalogue
from view.runs import LAYERS, MOMENTS, served, write_run

pytest.importorskip("plotly")
if chromium() is None:
    pytest.skip("no Chromium here", allow_module_level=True)

VIEWS = {
    "overview": ["imbalance", "layers", "copies", "time"],
    "record": ["ranks", "forward", "backward"],
    "compare": ["runs", "runlayers"],
}


@pytest.fixture(scope="module")
def server(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    shutil.copytree(run, folder / "run")
    write_run(folder / "short", moments=4)
    shutil.copytree(run, folder / "torn")
    (folder / "torn/header.json").write_text('{"format": "ultraep-trace"')
    with served(folder) as running:
        yield running


def opened(address, **window):
    page, messages = browse(address, **window)
    assert messages == []
    return page


def text_of(page, name):
    """Return the text of the element with this id, without tags."""
    inside = re.search(rf'id="{name}"[^>]*>(.*?)</(?:h1|p|ul|dl|section)>', page, re.DOTALL)[1]
    return html.unescape(re.sub("<[^>]*>", " ", inside))


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_drawn(server, view):
    page = opened(f"{server.url}#view={view}&trace=run")
    for plot in VIEWS[view]:
        drawn = re.search(rf'<div [^>]*id="plot-{plot}".*?(?=<div [^>]*id="plot-|\Z)', page, re.S)
        assert "main-svg" in drawn[0]
    assert re.search('id="error" role="alert" hidden', page)
    assert "torn/header.json: truncated or damaged" in text_of(page, "notes")


def test_a_damaged_trace_is_named(server):
    page = opened(f"{server.url}#view=overview&trace=torn")
    assert "truncated or damaged" in text_of(page, "error")
    assert re.search('id="view-overview" hidden', page), "nothing to draw"
    assert "torn (cannot be opened)" in page


def net_seconds(trace):
    """Return the seconds saved by replicas, minus the seconds spent on them."""
    stages = trace.header.stages
    own = trace.seconds[:, :, np.isin(stages, ("experts", "experts back"))]
    slowest, mean = own.max(axis=1).sum(axis=1), own.sum(axis=2).mean(axis=1)
    saved = np.where(trace.num_copies > 0, mean * trace.imbalance_before - slowest, 0)
    cost = trace.seconds[:, :, np.isin(stages, COST)].sum(axis=2).max(axis=1)
    return saved.sum() - cost.sum()


FOUND = """<script>(async () => {
const until = async (condition) => {
  while (!condition()) await new Promise((resolve) => setTimeout(resolve, 20));
};
const drawn = () => document.body.dataset.shown === location.hash;
await until(drawn);
const found = {
  wide: document.documentElement.scrollWidth > window.innerWidth,
  before: find("plot-imbalance").data[2].y, after: find("plot-layers").data[1].y,
  speed: gainWords({training: {loss: [2, 1], tokens_per_second: [50, 100, 100]}},
                   {training: {loss: [2, 1.0005], tokens_per_second: [116, 116, 116]}}),
  loss: lossWords([2, 1], [2, 1.05]),
};
const overview = location.hash;
find("plot-imbalance").emit("plotly_click", {points: [{pointIndex: 5}]});
await until(() => location.hash !== overview && drawn());
found.clicked = location.hash;
found.description = find("description").textContent;
location.hash = overview;
await until(() => location.hash === overview && drawn());
find("plot-layers").emit("plotly_click", {points: [{x: 1}]});
await until(() => location.hash.includes("layer=1"));
document.body.dataset.found = JSON.stringify(found);
})()</script>"""


def test_an_exported_file_needs_no_server(run, trace, tmp_path):
    """It shows the numbers of the trace, clicks open microbatches, and a phone is wide enough."""
    path = tmp_path / "run.html"
    catalogue = Catalogue([run, write_run(tmp_path / "short", moments=4)])
    assert write_page(catalogue, path) == len(trace) + 4 * LAYERS
    assert str(run) not in path.read_text("utf-8")
    path.write_text(path.read_text("utf-8").replace("</body>", f"{FOUND}</body>"), "utf-8")
    page = opened(f"{path.as_uri()}#view=overview&trace=run", width=390)
    found = json.loads(html.unescape(re.search('data-found="(.*?)"', page)[1]))
    before, after = trace.imbalance_before, trace.imbalance_after
    assert text_of(page, "imbalance") == f"Imbalance {before.mean():.2f} \u2192 {after.mean():.2f}"
    cards = " ".join(text_of(page, "cards").split())
    assert f"worst imbalance {before.max():.2f} \u2192 {after.max():.2f}" in cards
    assert f"records {len(trace)}" in cards
    net = re.search(r"(-?[\d.]+) (ms|\u00b5s) per microbatch", text_of(page, "net"))
    shown = float(net[1]) * {"ms": 1e-3, "\u00b5s": 1e-6}[net[2]]
    assert shown == pytest.approx(abs(net_seconds(trace)) / MOMENTS, rel=0.02)
    moment = trace.step * 2 + trace.microbatch
    means = [before[moment == at].mean() for at in range(MOMENTS)]
    np.testing.assert_allclose(found["before"], means, atol=1e-6)
    means = [trace.of_layer(layer).imbalance_after.mean() for layer in range(LAYERS)]
    np.testing.assert_allclose(found["after"], means, atol=1e-6)
    assert not found["wide"]
    assert found["speed"] == "1.16x training speed, same loss"
    assert "5.0 % apart" in found["loss"]
    own = np.flatnonzero(moment == 5)
    worst = own[before[own].argmax()]
    assert f"step=2&layer={trace.layer[worst]}&microbatch=1" in found["clicked"]
    assert f"imbalance {before[worst]:.3f} without replicas" in found["description"]


def test_a_reload_shows_what_a_running_job_has_written(tmp_path):
    with served(write_run(tmp_path / "run", moments=3, ranks=(0, 1, 2))) as server:
        assert "no record that all ranks wrote" in text_of(opened(server.url), "notes")
        write_run(tmp_path / "run", moments=3, ranks=(3,))
        assert f"records {3 * LAYERS}" in " ".join(text_of(opened(server.url), "cards").split())
