"""The page in a real browser: every view, links, clicks, and the numbers that it shows."""

import json
import re
import shutil

import numpy as np
import pytest
from browser import Browser, chromium

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
def page(window):
    """An empty page; afterwards, check that it printed and loaded nothing unexpected."""
    window.open("about:blank")
    window.messages.clear()
    window.requests.clear()
    window.look()
    yield window
    assert window.messages == []
    loaded = {url for url in window.requests if not url.startswith(("data:", "blob:", "about:"))}
    assert all(url.startswith(("http://127.0.0.1:", "file:")) for url in loaded), loaded


def net_seconds(trace):
    """Return the seconds saved by replicas, minus the seconds spent on them."""
    stages = trace.header.stages
    own = trace.seconds[:, :, np.isin(stages, ("experts", "experts back"))]
    slowest, mean = own.max(axis=1).sum(axis=1), own.sum(axis=2).mean(axis=1)
    saved = np.where(trace.num_copies > 0, mean * trace.imbalance_before - slowest, 0)
    cost = trace.seconds[:, :, np.isin(stages, COST)].sum(axis=2).max(axis=1)
    return saved.sum() - cost.sum()


def goto(page, server, link):
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
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth"), "too wide"
    assert page.run("document.getElementById('error').hidden")


def test_the_numbers_of_the_trace(page, server, trace):
    goto(page, server, "view=overview&trace=run")
    before, after = trace.imbalance_before, trace.imbalance_after
    assert page.text("imbalance") == f"Imbalance {before.mean():.2f} \u2192 {after.mean():.2f}"
    assert card(page, "worst imbalance") == [f"{before.max():.2f} \u2192 {after.max():.2f}"]
    assert card(page, "records") == [str(len(trace))]
    net = re.search(r"(-?[\d.]+) (ms|\u00b5s) per microbatch", page.text("net"))
    shown = float(net[1]) * {"ms": 1e-3, "\u00b5s": 1e-6}[net[2]]
    assert shown == pytest.approx(abs(net_seconds(trace)) / MOMENTS, rel=0.02)
    line = page.run("find('plot-imbalance').data[2].y")
    moment = trace.step * 2 + trace.microbatch
    means = [trace.imbalance_before[moment == at].mean() for at in range(MOMENTS)]
    np.testing.assert_allclose(line, means, atol=1e-6)
    bars = page.run("find('plot-layers').data[1].y")
    means = [trace.of_layer(layer).imbalance_after.mean() for layer in range(LAYERS)]
    np.testing.assert_allclose(bars, means, atol=1e-6)


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
    page.run("history.back()")
    page.wait("location.hash.includes('view=overview')")
    drawn(page)
    page.click(*spot(page, "layers", 1, "plot.data[1].y[1] / 2"))
    page.wait("location.hash.includes('layer=1')")


def test_two_traces_are_compared(page, run, trace, tmp_path):
    """Of a demo, the headline names speed and loss; of other traces, what they contain."""
    for policy in ("none", "ultraep"):
        shutil.copytree(run, tmp_path / f"demo/{policy}/trace")
    header = tmp_path / "demo/none/trace/header.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | {"policy": "none"}))
    with served(tmp_path / "demo") as server:
        goto(page, server, "")
        after = trace.imbalance_after.mean()
        assert page.text("verdict").startswith("MoE layers 1.00x as fast, imbalance")
        assert page.text("against") == "ultraep compared with none"
        rows = page.run(ROWS.format("#table"))
        assert [row[0] for row in rows] == ["none", "ultraep"]
        assert rows[0][1] == f"{trace.imbalance_before.mean():.3f} \u2192 {after:.3f}"
        words = page.run(
            "gainWords({training: {loss: [2, 1], tokens_per_second: [50, 100, 100]}},"
            " {training: {loss: [2, 1.0005], tokens_per_second: [116, 116, 116]}})"
        )
        assert words == "1.16x training speed, same loss"
        assert "5.0 % apart" in page.run("lossWords([2, 1], [2, 1.05])")
        page.open("about:blank")


def test_a_damaged_trace_is_named_and_the_rest_is_shown(page, server):
    goto(page, server, "")
    assert "torn/header.json: truncated or damaged" in page.text("notes")
    assert page.run("document.querySelector('#plot-runs .main-svg') !== null")
    goto(page, server, "view=overview&trace=torn")
    shows(page, "error", "truncated or damaged")
    assert page.run("document.getElementById('view-overview').hidden"), "nothing to draw"
    assert "torn (cannot be opened)" in page.run("find('trace').innerText")


@pytest.mark.slow
def test_an_exported_comparison_needs_no_server(page, run, trace, tmp_path):
    catalogue = Catalogue([run, write_run(tmp_path / "short", moments=4)])
    assert write_page(catalogue, tmp_path / "run.html") == len(trace) + 4 * LAYERS
    assert str(run) not in (tmp_path / "run.html").read_text("utf-8")
    address = (tmp_path / "run.html").as_uri()
    for view in VIEWS:
        page.open("about:blank")
        page.open(f"{address}#view={view}&trace=run")
        for plot in VIEWS[view]:
            page.wait(f"document.querySelector('#plot-{plot} .main-svg')")
    page.open("about:blank")
    page.open(f"{address}#view=record&trace=run")
    drawn(page)
    worst = int(trace.imbalance_before.argmax())
    shows(page, "description", f"imbalance {trace.imbalance_before[worst]:.3f} without replicas")
    assert all(url.startswith(("file:", "data:", "blob:", "about:")) for url in page.requests)


def test_a_reload_shows_what_a_running_job_has_written(window, tmp_path):
    window.messages.clear()
    with served(write_run(tmp_path / "run", moments=3, ranks=(0, 1, 2))) as server:
        window.open(server.url)
        drawn(window)
        shows(window, "notes", "no record that all ranks wrote")
        write_run(tmp_path / "run", moments=3, ranks=(3,))
        window.call("Page.reload")
        window.wait("document.querySelector('#plot-imbalance .main-svg')")
        assert card(window, "records") == [str(3 * LAYERS)]
        assert window.messages == []
