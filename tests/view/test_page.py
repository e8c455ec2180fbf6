"""The page in a real browser: every view, links, clicks, keys, and the numbers that it shows."""

import re
import shutil

import numpy as np
import pytest
from browser import Browser, chromium
from traces import arrived

import ultraep
from ultraep import BalanceConfig, Rates, Recorder, Topology
from ultraep.hops import Relay
from view.runs import LAYERS, MOMENTS, TOPOLOGY, served, write_run

pytest.importorskip("plotly")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
if chromium() is None:
    pytest.skip("no Chromium here", allow_module_level=True)

from ultraep.tools.view.catalogue import Catalogue
from ultraep.tools.view.export import write_page

VIEWS = {
    "overview": ["imbalance", "layers", "copies", "time"],
    "map": ["map"],
    "record": ["ranks", "flows", "forward", "backward"],
    "compare": [],
}
LONG_NAME = "the-run-of-last-week-with-a-name-that-tells-all-of-its-settings-2026-11-16"


@pytest.fixture(scope="module")
def server(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    shutil.copytree(run, folder / "run")
    write_run(folder / "short", moments=4)
    shutil.copytree(folder / "short", folder / LONG_NAME)
    shutil.copytree(run, folder / "torn")
    (folder / "torn/header.json").write_text('{"format": "ultraep-trace"')
    (folder / "report.html").write_text("<title>r</title><link rel=icon href='data:,'><p>A report.")
    with served(folder) as found:
        yield found


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(window, server):
    """An empty page; at the end, that nothing was said in the console or asked for elsewhere."""
    window.open("about:blank")
    window.messages.clear()
    window.requests.clear()
    window.look()
    yield window
    assert window.messages == []
    asked = {url for url in window.requests if not url.startswith(("data:", "blob:", "about:"))}
    assert all(url.startswith((server.url, "file:")) for url in asked), asked


def goto(page, server, link):
    """Open a link, and wait until it is drawn."""
    page.open("about:blank")
    page.open(f"{server.url}#{link}")
    drawn(page)


def drawn(page):
    page.wait("document.body && document.body.dataset.shown === location.hash")


def number_of(server, name):
    return next(n for n, one in enumerate(server.catalogue.shown) if one.item.name == name)


def card(page, name):
    shown = page.run("[...document.querySelectorAll('#cards div')].map((one) => one.innerText)")
    return next(text.split("\n")[1:] for text in shown if text.split("\n")[0] == name)


@pytest.mark.parametrize(
    "look", [{}, {"dark": True}, {"width": 390}], ids=["light", "dark", "narrow"]
)
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_drawn(page, server, view, look):
    page.look(**look)
    goto(page, server, f"view={view}&trace={number_of(server, 'run')}")
    for plot in VIEWS[view]:
        page.wait(f"document.querySelector('#plot-{plot} .main-svg')")
    wide = page.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert wide, "it must be scrolled sideways"
    assert page.run("document.getElementById('error').hidden")


def test_long_names_fit_a_phone(page, server):
    page.look(width=390)
    number, other = number_of(server, "run"), number_of(server, LONG_NAME)
    for link in (f"view=compare&trace={number}&other={other}", f"view=compare&trace={other}"):
        goto(page, server, link)
        assert page.run("document.documentElement.scrollWidth <= window.innerWidth")


def test_the_numbers_are_those_of_the_trace(page, server, trace):
    goto(page, server, f"view=overview&trace={number_of(server, 'run')}")
    assert card(page, "records")[0] == str(len(trace))
    assert card(page, "imbalance without copies") == [
        f"{trace.imbalance_before.mean():.3f}",
        f"worst {trace.imbalance_before.max():.3f}",
    ]
    assert card(page, "imbalance with copies")[0] == f"{trace.imbalance_after.mean():.3f}"
    assert card(page, "copies")[0] == str(trace.num_copies.sum())
    line = page.run("find('plot-imbalance').data[2].y")
    moment = trace.step * 2 + trace.microbatch
    wanted = [trace.imbalance_before[moment == at].mean() for at in range(MOMENTS)]
    np.testing.assert_allclose(line, wanted, atol=1e-6)
    bars = page.run("find('plot-layers').data[1].y")
    wanted = [trace.of_layer(layer).imbalance_after.mean() for layer in range(LAYERS)]
    np.testing.assert_allclose(bars, wanted, atol=1e-6)


def test_a_link_leads_to_one_microbatch(page, server, trace):
    link = f"view=record&trace={number_of(server, 'run')}&step=3&layer=2&microbatch=1"
    goto(page, server, link)
    n = int(np.flatnonzero((trace.step == 3) & (trace.layer == 2) & (trace.microbatch == 1))[0])
    plan = trace.plan(n)
    told = page.text("told")
    assert told.startswith("Step 3, microbatch 1, layer 2 (ultraep): imbalance ")
    before, after = trace.imbalance_before[n], trace.imbalance_after[n]
    assert f"imbalance {before:.3f} without replicas, {after:.3f} with." in told
    heights = page.run(
        "find('plot-ranks').data"
        ".map(({x, y, xaxis}) => x.map((rank, at) => [xaxis, rank, y[at]])).flat()"
    )
    for axis, wanted in (("x", trace.initial_rank_loads[n]), ("x2", trace.rank_loads[n])):
        found = np.zeros(TOPOLOGY.ranks)
        for _, rank, rows in (one for one in heights if one[0] == axis):
            found[rank] += rows
        np.testing.assert_array_equal(found, wanted)
    page.run("document.getElementById('listed').open = true")
    rows = page.run(
        "[...document.querySelectorAll('#copies tbody tr')].map((row) => row.innerText)"
    )
    shown = {
        tuple(re.findall(r"\d+", row.split("\t")[0] + " " + row.split("\t")[3])) for row in rows
    }
    wanted = {(str(c[0]), str(q)) for c, q in zip(plan.replicas, plan.quotas, strict=True)}
    assert shown == wanted
    assert "this trace does not tell how weights were to be sent" in page.text("ways")
    widths = page.run("find('plot-forward').data.filter((one) => one.name === 'experts')[0].x")
    stage = trace.header.stages.index("experts")
    np.testing.assert_allclose(widths, 1e3 * trace.seconds[n, :, stage], atol=1e-3)


def spot(page, plot, x, y):
    """Where a point of a plot is on the screen."""
    return page.run(
        f"""(() => {{
        const plot = find("plot-{plot}"), whole = plot._fullLayout;
        plot.scrollIntoView({{ block: "center" }});
        const box = plot.getBoundingClientRect(), {{ l, t }} = whole._size;
        return [box.left + l + whole.xaxis.c2p({x}), box.top + t + whole.yaxis.c2p({y})];
        }})()"""
    )


def test_clicks_lead_to_microbatches(page, server, trace):
    number = number_of(server, "run")
    goto(page, server, f"view=overview&trace={number}")
    moment = trace.step * 2 + trace.microbatch
    page.click(*spot(page, "imbalance", 5, "plot.data[2].y[5]"))
    page.wait("location.hash.includes('view=record')")
    drawn(page)
    own = np.flatnonzero(moment == 5)
    worst = own[trace.imbalance_before[own].argmax()]
    assert f"step=2&layer={trace.layer[worst]}&microbatch=1" in page.run("location.hash")
    goto(page, server, f"view=map&trace={number}")
    page.click(*spot(page, "map", 4, 2))
    page.wait("location.hash.includes('view=record')")
    assert "step=2&layer=2&microbatch=0" in page.run("location.hash")
    page.run("history.back()")
    page.wait("location.hash.includes('view=map')")


def test_the_keyboard_suffices(page, server, trace):
    goto(page, server, f"view=overview&trace={number_of(server, 'run')}")
    page.press("2")
    page.wait("document.querySelector('#plot-map .main-svg')")
    for _ in range(30):
        page.press("Tab")
        if page.run("document.activeElement.id") == "plot-map":
            break
    assert page.run("document.activeElement.id") == "plot-map"
    page.press("ArrowRight", "ArrowRight", "ArrowDown")
    n = int(np.flatnonzero((trace.step == 1) & (trace.layer == 1) & (trace.microbatch == 0))[0])
    assert page.text("cell") == f"layer 1, step 1, microbatch 0: {trace.imbalance_before[n]:.3f}"
    page.press("Enter")
    page.wait(
        "document.getElementById('told').innerText.startsWith('Step 1, microbatch 0, layer 1')"
    )
    page.run("document.activeElement.blur()")
    page.press("ArrowRight")
    page.wait(
        "document.getElementById('told').innerText.startsWith('Step 1, microbatch 1, layer 1')"
    )
    page.press("ArrowDown")
    page.wait(
        "document.getElementById('told').innerText.startsWith('Step 1, microbatch 1, layer 2')"
    )
    page.press("w")
    worst = int(trace.imbalance_before.argmax())
    wanted = f"Step {trace.step[worst]}, microbatch {trace.microbatch[worst]}"
    page.wait(f"document.getElementById('told').innerText.startsWith('{wanted}')")
    page.press("?")
    page.wait("document.getElementById('help').open")
    page.press("Escape")
    page.wait("!document.getElementById('help').open")
    page.press("]")
    page.wait(f"location.hash.includes('trace={number_of(server, 'short')}')")


def test_a_trace_beside_its_replay(page, server, trace):
    number = number_of(server, "run")
    goto(page, server, f"view=compare&trace={number}&other=replay&policy=none")
    page.wait("!document.getElementById('compared').hidden")
    rows = page.run(
        "[...document.querySelectorAll('#table tbody tr')].map((one) => one.innerText.split('\\t'))"
    )
    before, after = trace.imbalance_before.mean(), trace.imbalance_after.mean()
    assert rows[0][2:4] == [f"{before:.3f}", f"{after:.3f}"]
    assert rows[1][2:4] == [f"{before:.3f}", f"{before:.3f}"]
    assert "30 records planned again." in page.text("working")


def test_a_form_is_filled_in_and_sent_with_keys(page, server):
    goto(page, server, f"view=compare&trace={number_of(server, 'run')}")
    page.run("document.getElementById('ranks').focus()")
    page.press("3", "Enter")
    page.wait("!document.getElementById('error').hidden")
    assert "4 recorded ranks cannot become 3" in page.text("error")
    page.messages[:] = [one for one in page.messages if "400 (Bad Request)" not in one]


def test_two_traces_side_by_side(page, server):
    number, other = number_of(server, "run"), number_of(server, "short")
    goto(page, server, f"view=compare&trace={number}&other={other}")
    page.wait("!document.getElementById('compared').hidden")
    rows = page.run(
        "[...document.querySelectorAll('#table tbody tr')].map((one) => one.innerText.split('\\t'))"
    )
    assert [row[:2] for row in rows] == [["run", "30"], ["short", "12"]]
    lines = page.run("find('plot-both').data.map(({name}) => name).filter(Boolean)")
    assert lines == ["run, without copies", "short, without copies", "run", "short"]


def test_a_damaged_trace_is_told_and_the_rest_is_shown(page, server):
    goto(page, server, "")
    assert "torn/header.json: truncated or damaged" in page.text("notes")
    assert page.run("document.querySelector('#plot-imbalance .main-svg') !== null")
    goto(page, server, f"view=overview&trace={number_of(server, 'torn')}")
    page.wait("!document.getElementById('error').hidden")
    assert "truncated or damaged" in page.text("error")
    assert page.run("document.getElementById('view-overview').hidden"), "nothing to be drawn"
    assert "torn (cannot be opened)" in page.run("find('trace').innerText")


def test_an_empty_trace_is_told(window, tmp_path):
    write_run(tmp_path / "run", ranks=[0])
    with served(tmp_path / "run") as server:
        goto(window, server, "")
        assert "nothing was recorded, or nothing that all ranks have" in window.text("notes")
        assert window.run("document.getElementById('drawn').hidden")
        for view in ("map", "record", "compare"):
            goto(window, server, f"view={view}")
        assert window.messages == []


def test_a_report_is_shown_by_itself(page, server):
    goto(page, server, "")
    assert page.run("document.querySelector('#reports a').innerText") == "report.html"
    page.open(f"{server.url}report/{number_of(server, 'report.html')}")
    page.wait("document.body && document.body.innerText.includes('A report.')")


def test_a_chain_is_drawn_as_it_was_sent(window, tmp_path):
    """Every copy of an expert hands it on to the next, and the page says that it was told to."""
    topology = Topology(ranks=8, experts=16, slots=1)
    loads = np.full((8, 16), 3)
    loads[:, 2] = 200
    config = BalanceConfig(rates=Rates(row=1000, copy=1))
    plan = ultraep.plan(loads, topology, config)
    for rank in range(8):
        told = {"rank": rank, "relay": Relay("chain", 4)}
        with Recorder(tmp_path / "run", topology, config, **told) as recorder:
            recorder.add(plan=plan, slot_rows=arrived(plan, rank), bytes_moved=10, step=0)
    with served(tmp_path / "run") as server:
        window.look(width=390)
        goto(window, server, "view=record")
        assert "passed on from copy to copy, as the balancer was told." in window.text("ways")
        assert "Numbers are ranks" in window.text("ways")
        assert window.run("find('plot-flows').data[0].node.label.length") == plan.num_replicas + 1
        assert window.run("find('plot-flows').data[0].node.label[0]") == "1"
        links = window.run(
            "(({source, target}) => [source, target])(find('plot-flows').data[0].link)"
        )
        assert sorted(links[0]) == list(range(plan.num_replicas))
        assert f"By its rates ({config.rates} ps) it takes" in window.text("told")
        assert "objective time" in window.run("find('facts').textContent")
        window.look()
        goto(window, server, "view=record")
        assert window.run("find('plot-flows').data[0].node.label[0]") == "rank 1"
        assert window.messages == []


def test_a_record_that_is_not_there_is_told(page, server):
    goto(page, server, f"view=record&trace={number_of(server, 'run')}&step=99&layer=0&microbatch=0")
    page.wait("!document.getElementById('error').hidden")
    assert "no such record" in page.text("error")
    page.messages[:] = [one for one in page.messages if "400 (Bad Request)" not in one]


def test_what_is_exported_needs_nobody(page, run, trace, tmp_path):
    catalogue = Catalogue([run])
    assert write_page(catalogue, tmp_path / "run.html") == len(trace)
    catalogue.close()
    page.open((tmp_path / "run.html").as_uri())
    page.wait("document.querySelector('#plot-microbatches .main-svg')")
    drawn_ones = ("imbalance", "layers", "before", "after", "copies", "time", "microbatches")
    for plot in (*drawn_ones, "flows", "forward", "backward"):
        assert page.run(f"document.querySelector('#plot-{plot} .main-svg') !== null"), plot
    worst = int(trace.imbalance_before.argmax())
    assert f"imbalance {trace.imbalance_before[worst]:.3f} without replicas" in page.text("told")
    assert all(url.startswith(("file:", "data:", "blob:")) for url in page.requests)


def test_the_page_follows_a_running_job(window, tmp_path, monkeypatch):
    from ultraep.tools.view import catalogue as catalogue_module

    monkeypatch.setattr(catalogue_module, "PERIOD", 0.1)
    window.messages.clear()
    with served(tmp_path / "run", live=True, finished=False) as server:
        window.open(server.url)
        window.wait("document.body && document.body.innerText.includes('Waiting for a trace in')")
        write_run(tmp_path / "run", moments=3)
        window.wait(f"document.body.innerText.includes('Follows the run: {3 * LAYERS} records')")
        window.wait("document.querySelector('#plot-imbalance .main-svg')")
        shutil.rmtree(tmp_path / "run")
        window.wait("document.body.innerText.includes('the folder is gone')")
        assert window.messages == []
    window.wait("document.body.innerText.includes('the viewer does not answer')")
    window.messages.clear()
