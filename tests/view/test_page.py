"""The page in a real browser: every view, links, clicks, and the numbers that it shows."""

import json
import re
import shutil

import numpy as np
import pytest
from browser import Browser, chromium

from ultraep_tools.view import catalogue as catalogue_module
from ultraep_tools.view.api import write_page
from ultraep_tools.view.catalogue import Catalogue
from view.runs import LAYERS, MOMENTS, TOPOLOGY, served, write_run

pytest.importorskip("plotly")
if chromium() is None:
    pytest.skip("no Chromium here", allow_module_level=True)

VIEWS = {
    "overview": ["imbalance", "layers", "copies", "time"],
    "map": ["map"],
    "record": ["ranks", "flows", "forward", "backward"],
    "compare": ["runs", "runlayers"],
}
ROWS = "[...document.querySelectorAll('{} tbody tr')].map((row) => row.innerText.split('\\t'))"


@pytest.fixture(scope="module")
def server(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    shutil.copytree(run, folder / "run")
    write_run(folder / "short", moments=4)
    shutil.copytree(run, folder / "torn")
    (folder / "torn/header.json").write_text('{"format": "ultraep-trace"')
    with served(folder) as running:
        yield running


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def page(window, server):
    """An empty page; afterwards, check that it printed and loaded nothing unexpected."""
    window.open("about:blank")
    window.messages.clear()
    window.requests.clear()
    window.look()
    yield window
    assert window.messages == []
    loaded = {url for url in window.requests if not url.startswith(("data:", "blob:", "about:"))}
    assert all(url.startswith((server.url, "file:")) for url in loaded), loaded


def goto(page, server, link):
    """Open a link, and wait until it is drawn."""
    page.open("about:blank")
    page.open(f"{server.url}#{link}")
    drawn(page)


def drawn(page):
    page.wait("document.body && document.body.dataset.shown === location.hash")


def shows(page, element, words):
    page.wait(f"document.getElementById('{element}').innerText.includes({json.dumps(words)})")


def card(page, name):
    shown = page.run("[...document.querySelectorAll('#cards div')].map((card) => card.innerText)")
    return next(text.split("\n")[1:] for text in shown if text.split("\n")[0] == name)


@pytest.mark.parametrize("look", [{"width": 1360}, {"width": 390}], ids=["wide", "narrow"])
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_drawn(page, server, view, look):
    page.look(**look)
    goto(page, server, f"view={view}&trace=run")
    for plot in VIEWS[view]:
        page.wait(f"document.querySelector('#plot-{plot} .main-svg')")
        buttons = f"document.querySelectorAll('#plot-{plot} .modebar-btn')"
        titles = page.run(f"[...{buttons}].map((button) => button.dataset.title)")
        assert "Download the numbers as CSV" in titles
        assert any("PNG" in title or "plot as a" in title for title in titles)
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth"), "too wide"
    assert page.run("document.getElementById('error').hidden")


def test_the_numbers_of_the_trace(page, server, trace):
    goto(page, server, "view=overview&trace=run")
    assert card(page, "records")[0] == str(len(trace))
    assert card(page, "imbalance without replicas") == [
        f"{trace.imbalance_before.mean():.3f}",
        f"worst {trace.imbalance_before.max():.3f}",
    ]
    assert card(page, "imbalance with replicas")[0] == f"{trace.imbalance_after.mean():.3f}"
    assert card(page, "replicas")[0] == str(trace.num_copies.sum())
    line = page.run("find('plot-imbalance').data[2].y")
    moment = trace.step * 2 + trace.microbatch
    means = [trace.imbalance_before[moment == at].mean() for at in range(MOMENTS)]
    np.testing.assert_allclose(line, means, atol=1e-6)
    bars = page.run("find('plot-layers').data[1].y")
    means = [trace.of_layer(layer).imbalance_after.mean() for layer in range(LAYERS)]
    np.testing.assert_allclose(bars, means, atol=1e-6)
    lines = page.run("csvText(csvRows(find('plot-imbalance').data))").splitlines()
    assert lines[0] == "series,x,y,value"
    assert len(lines) == 1 + 2 * MOMENTS


def test_a_link_opens_one_microbatch(page, server, trace):
    goto(page, server, "view=record&trace=run&step=3&layer=2&microbatch=1")
    n = int(np.flatnonzero((trace.step == 3) & (trace.layer == 2) & (trace.microbatch == 1))[0])
    plan, words = trace.plan(n), page.text("description")
    assert words.startswith("Step 3, microbatch 1, layer 2 (ultraep): imbalance ")
    before, after = trace.imbalance_before[n], trace.imbalance_after[n]
    assert f"imbalance {before:.3f} without replicas, {after:.3f} with." in words
    heights = page.run(
        "find('plot-ranks').data"
        ".map(({x, y, xaxis}) => x.map((rank, at) => [xaxis, rank, y[at]])).flat()"
    )
    for axis, loads in (("x", trace.initial_rank_loads[n]), ("x2", trace.rank_loads[n])):
        heights_of_ranks = np.zeros(TOPOLOGY.ranks)
        for _, rank, rows in (bar for bar in heights if bar[0] == axis):
            heights_of_ranks[rank] += rows
        np.testing.assert_array_equal(heights_of_ranks, loads)
    page.run("document.getElementById('listed').open = true")
    shown = {
        tuple(re.findall(r"\d+", row[0] + " " + row[3])) for row in page.run(ROWS.format("#copies"))
    }
    assert shown == {(str(c[0]), str(q)) for c, q in zip(plan.replicas, plan.quotas, strict=True)}
    assert "the trace does not contain the relay mode" in page.text("paths")
    widths = page.run("find('plot-forward').data.filter(({name}) => name === 'experts')[0].x")
    stage = trace.header.stages.index("experts")
    np.testing.assert_allclose(widths, 1e3 * trace.seconds[n, :, stage], atol=1e-3)


def spot(page, plot, x, y):
    """Return the position of a point of a plot on the screen."""
    return page.run(
        f"""(() => {{
        const plot = find("plot-{plot}"), whole = plot._fullLayout;
        plot.scrollIntoView({{ block: "center" }});
        const box = plot.getBoundingClientRect(), {{ l, t }} = whole._size;
        return [box.left + l + whole.xaxis.c2p({x}), box.top + t + whole.yaxis.c2p({y})];
        }})()"""
    )


def test_clicks_open_microbatches(page, server, trace):
    goto(page, server, "view=overview&trace=run")
    page.click(*spot(page, "imbalance", 5, "plot.data[2].y[5]"))
    page.wait("location.hash.includes('view=record')")
    drawn(page)
    own = np.flatnonzero(trace.step * 2 + trace.microbatch == 5)
    worst = own[trace.imbalance_before[own].argmax()]
    assert f"step=2&layer={trace.layer[worst]}&microbatch=1" in page.run("location.hash")
    goto(page, server, "view=map&trace=run")
    page.click(*spot(page, "map", 4, 2))
    page.wait("location.hash.includes('view=record')")
    assert "step=2&layer=2&microbatch=0" in page.run("location.hash")
    page.run("history.back()")
    page.wait("location.hash.includes('view=map')")


def test_a_trace_and_its_replay(page, server, trace):
    goto(page, server, "view=compare&trace=run&also=-&policy=none")
    shows(page, "working", "Replanned 30 records.")
    rows = page.run(ROWS.format("#table"))
    before, after = trace.imbalance_before.mean(), trace.imbalance_after.mean()
    assert rows[0][3:5] == [f"{before:.3f}", f"{after:.3f}"]
    assert rows[1][3:5] == [f"{before:.3f}", f"{before:.3f}"]


def test_a_damaged_trace_is_named_and_the_rest_is_shown(page, server):
    goto(page, server, "")
    assert "torn/header.json: truncated or damaged" in page.text("notes")
    assert page.run("document.querySelector('#plot-imbalance .main-svg') !== null")
    goto(page, server, "view=overview&trace=torn")
    shows(page, "error", "truncated or damaged")
    assert page.run("document.getElementById('view-overview').hidden"), "nothing to draw"
    assert "torn (cannot be opened)" in page.run("find('trace').innerText")


@pytest.mark.slow
def test_an_exported_file_needs_no_server(page, run, trace, tmp_path):
    catalogue = Catalogue([run])
    assert write_page(catalogue, tmp_path / "run.html") == len(trace)
    catalogue.close()
    address = (tmp_path / "run.html").as_uri()
    for view in ("overview", "map", "record"):
        page.open("about:blank")
        page.open(f"{address}#view={view}")
        for plot in VIEWS[view]:
            page.wait(f"document.querySelector('#plot-{plot} .main-svg')")
    worst = int(trace.imbalance_before.argmax())
    shows(page, "description", f"imbalance {trace.imbalance_before[worst]:.3f} without replicas")
    assert page.run("document.querySelector('nav a[data-view=compare]')") is None
    assert all(url.startswith(("file:", "data:", "blob:", "about:")) for url in page.requests)


def test_the_page_follows_a_running_job(window, tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue_module, "PERIOD", 0.1)
    window.messages.clear()
    with served(tmp_path / "run", live=True, finished=False) as server:
        window.open(server.url)
        window.wait("document.body && document.body.innerText.includes('Waiting for a trace in')")
        write_run(tmp_path / "run", moments=3)
        shows(window, "status", f"Follows the run: {3 * LAYERS} records")
        window.wait("document.querySelector('#plot-imbalance .main-svg')")
        shutil.rmtree(tmp_path / "run")
        shows(window, "notes", "the folder is gone")
        assert window.messages == []
    shows(window, "status", "the viewer does not answer")
    window.messages.clear()
