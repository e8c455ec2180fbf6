"""An inspection: its texts, trace, result and report, and invalid options."""

import json

import numpy as np
import pytest
from browser import Browser, chromium
from demo.test_report import embedded
from inspect_models import TEXTS, routing_of, save_tokenizer

from ultraep.errors import ConfigError, FileError
from ultraep.trace.read import read_trace
from ultraep_tools.inspect.findings import label, write_report
from ultraep_tools.inspect.options import InspectOptions
from ultraep_tools.inspect.run import Inspection, claim_folder
from ultraep_tools.inspect.texts import texts_of, tokenizer_of, windows_of
from ultraep_tools.replay import cases, differing, replayed

pytest.importorskip("transformers")
SETTINGS = {"tokens": 192, "window": 64, "sequence_length": 16, "ep": "4,8", "device": "cpu"}


class Done:
    """A finished inspection and its outputs."""

    def __init__(self, out, **options):
        self.out, self.inspection = out, Inspection(InspectOptions(**(SETTINGS | options)))
        with claim_folder(out) as folder:
            with routing_of(self.inspection.opened.model) as self.ids:
                self.recorder = self.inspection.record(folder, lambda *_: None)
            self.findings = self.inspection.findings(folder, lambda *_: None)
        self.trace = read_trace(out / "trace")
        self.result = self.inspection.result(self.recorder, self.findings, 1.5)


@pytest.fixture(scope="module")
def done(checkpoint, text_files, tmp_path_factory):
    return Done(tmp_path_factory.mktemp("out"), model=checkpoint, text=list(text_files))


def test_the_trace_holds_the_routing_and_replays(done):
    trace, windows = done.trace, 3 * len(TEXTS)
    assert (trace.header.ranks, trace.header.experts, trace.header.slots) == (1, 16, 1)
    assert len(trace) == 4 * windows
    assert trace.dropped == trace.left_out == 0
    assert differing(trace) == []
    for number, (name, ids) in enumerate(done.ids.items()):
        assert name == f"model.layers.{number}.mlp.experts"
        own = trace.of_layer(number)
        assert own.step.tolist() == list(range(windows))
        for window, chosen in enumerate(ids.split(64)):
            expected = np.bincount(chosen.reshape(-1), minlength=16)
            assert own.loads[window, 0].tolist() == expected.tolist()
            assert own.slot_rows[window].tolist() == [*expected, 0]
    assert "letters 0 to 2, numbers 3 to 5" in trace.header.note


def test_rows_are_replays_of_the_trace(done):
    rows = done.result.rows
    labels = [(row["policy"], row["ranks"], row["slots"]) for row in rows]
    of_size = [("none", 1), *((name, n) for name in ("eplb", "quota", "ultraep") for n in (1, 2))]
    assert labels == [(name, ranks, slots) for ranks in (4, 8) for name, slots in of_size]
    for row, (policy, ranks, slots) in zip(rows, labels, strict=True):
        (case,) = cases(done.trace, policies=[policy], slots=[slots], ranks=[ranks], history=[1])
        means = replayed(done.trace, case).means()
        assert row["after_worst"] == means.pop("worst")
        assert {name: row[name] for name in means} == means
    content = json.loads(done.result.save(done.out).read_text())
    assert (content["family"], content["experts"], content["top_k"]) == ("qwen3_moe", 16, 8)
    assert (content["layers"], content["notes"], content["rows"]) == ([0, 1, 2, 3], [], rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"ep": "8,16"}, "--ep 16: ranks must lie between 1 and the 8 experts"),
        ({"slots": "9"}, "slots must lie between 0 and 8, got 9"),
        ({"layers": "1,9"}, "--layers 9: layers with experts are 0, 1"),
        ({"device": "abacus"}, "--device must be cpu, cuda or cuda:N, got 'abacus'"),
        ({"dtype": "int4"}, "--dtype must be one of float32"),
        ({"history": 0}, "--history must be at least 1, got 0"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Inspection(InspectOptions(**({"random": "mixtral", "ep": "4"} | options)))


@pytest.fixture(scope="module")
def page(done):
    pytest.importorskip("plotly")
    return write_report(done.out, done.result, done.findings).read_text("utf-8")


def test_the_page_shows_the_numbers_of_the_trace(done, page):
    trace, findings = done.trace, done.findings
    sizes, layers, texts = (embedded(page, name) for name in ("sizes", "layers", "texts"))
    assert sizes["sizes"] == [4, 8]
    assert (layers["names"], texts["names"]) == ([0, 1, 2, 3], list(TEXTS))
    assert label(findings.shown.case) == "ultraep with 1 slot"

    def check(plot, outcome, group, records):
        size = plot["sizes"].index(outcome.case.topology.ranks)
        drawn = plot["values"][size][label(outcome.case)]
        after, copies = outcome.after[records], outcome.copies[records]
        expected = {"mean": after.mean(), "worst": after.max(), "copies": copies.mean()}
        assert {key: drawn[key][group] for key in drawn} == pytest.approx(expected, abs=1e-6)

    for outcome in findings.outcomes:
        check(sizes, outcome, 0, slice(None))
        for layer in range(4):
            check(layers, outcome, layer, trace.layer == layer)
        for place, text in enumerate(TEXTS):
            check(texts, outcome, place, findings.text == text)
    experts = embedded(page, "experts")
    assert experts["texts"] == ["all texts", *TEXTS]
    loads = trace.loads[(trace.layer == 2) & (trace.step < 3)].sum(axis=(0, 1))
    np.testing.assert_allclose(experts["load"][1][2], loads / loads.mean(), atol=1e-3)


SELECT = """
    for (const [id, value] of Object.entries({
      "choice-layers": 1, "choice-texts": 1, "choice-experts": 2, "moment": 4, "layer": 1,
    })) {
      document.getElementById(id).value = value;
      document.getElementById(id).dispatchEvent(new Event("input"));
    }
"""


@pytest.mark.skipif(chromium() is None, reason="no Chromium here")
def test_a_browser_draws_all_plots_without_errors(done, page, tmp_path):
    """Selects other sizes, another text and another window, as a user would."""
    path = tmp_path / "page.html"
    path.write_text(page, "utf-8")
    with Browser(tmp_path / "home") as browser:
        browser.open(path.as_uri())
        for plot in ("sizes", "layers", "texts", "history", "experts", "microbatches"):
            browser.wait(f"document.querySelectorAll('#plot-{plot} .main-svg').length")
        browser.run(SELECT)
        sentence = browser.text("description")
        assert browser.messages == []
    record = (done.trace.step == 4) & (done.trace.layer == 1)
    before, after = (getattr(done.findings.shown, name)[record][0] for name in ("before", "after"))
    assert sentence.startswith("Window 4 (numbers), layer 1: imbalance ")
    assert f"{before:.3f} without replicas, {after:.3f} with." in sentence


transformers = pytest.importorskip("transformers")


def test_the_tokenizer_of_a_checkpoint_is_used_unless_damaged(tmp_path):
    assert tokenizer_of(tmp_path) is None
    vocabulary = save_tokenizer(tmp_path)
    assert tokenizer_of(tmp_path)("fox dog unheard") == [vocabulary["fox"], vocabulary["dog"], 0]
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuchTokenizer"}')
    with pytest.raises(FileError, match=r"cannot read its tokenizer.*\Z"):
        tokenizer_of(tmp_path)


def test_texts_have_different_names_and_sequences_of_one_length(tmp_path):
    files = [tmp_path / folder / "text.txt" for folder in "ab"]
    for file, text in zip(files, ("one two three four", "five " * 100), strict=True):
        file.parent.mkdir()
        file.write_text(text)

    def word_lengths(text):
        return [len(word) for word in text.split()]

    sizes = {"tokens": 64, "window": 16, "sequence": 8}
    spans, windows = windows_of(texts_of(files), word_lengths, **sizes)
    assert [(span.name, span.begin, span.end) for span in spans] == [
        ("text", 0, 0),
        (str(files[1]), 1, 4),
    ]
    assert {window.shape[1] for window in windows} == {4}
    with pytest.raises(ConfigError, match="is given twice"):
        texts_of([files[0], files[1], files[1]])
    with pytest.raises(FileError, match="the text empty is empty"):
        windows_of({"empty": ""}, list, **sizes)
    with pytest.raises(ConfigError, match="--window must be at least 1, got 0"):
        windows_of({"a": "b"}, list, **(sizes | {"window": 0}))
