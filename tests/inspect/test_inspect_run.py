"""An inspection: its texts, loads, findings and files, and invalid options."""

import json

import numpy as np
import pytest
import torch
from inspect_models import TEXTS, routing_of, save_tokenizer

from ultraep.errors import ConfigError, FileError
from ultraep.trace.read import read_trace
from ultraep_tools.inspect.findings import POLICIES, change_table
from ultraep_tools.inspect.options import InspectOptions
from ultraep_tools.inspect.run import Inspection, prepare_outputs
from ultraep_tools.inspect.texts import texts_of, tokenizer_of, windows_of
from ultraep_tools.replay import cases, differing, replayed

pytest.importorskip("transformers")
SETTINGS = {"tokens": 192, "window": 64, "sequence_length": 16, "ep": "4,8", "device": "cpu"}


class Done:
    def __init__(self, out, **options):
        self.out, self.inspection = out, Inspection(InspectOptions(**(SETTINGS | options), out=out))
        prepare_outputs(out)
        self.inspection.record(lambda *_: None)
        self.findings = self.inspection.findings(lambda *_: None)
        self.inspection.save(self.inspection.result(self.findings, 1.5))
        self.trace = read_trace(out / "trace")
        self.result = json.loads((out / "result.json").read_text())


@pytest.fixture(scope="module")
def done(checkpoint, text_files, tmp_path_factory):
    return Done(tmp_path_factory.mktemp("out"), model=checkpoint, text=list(text_files))


def test_the_trace_holds_the_routing_and_replays(done):
    trace, windows = done.trace, 3 * len(TEXTS)
    assert (trace.header.ranks, trace.header.experts, trace.header.slots) == (4, 16, 1)
    assert len(trace) == 4 * windows
    assert trace.dropped == trace.left_out == 0
    assert differing(trace) == []
    with done.inspection.model.loaded() as model, routing_of(model) as routing, torch.no_grad():
        for window in done.inspection.windows:
            model(input_ids=torch.from_numpy(window))
    for number, (name, ids) in enumerate(routing.items()):
        assert name == f"model.layers.{number}.mlp.experts"
        own = trace.of_layer(number)
        assert own.step.tolist() == list(range(windows))
        for window, chosen in enumerate(ids.split(64)):
            expected = np.bincount(chosen.reshape(-1), minlength=16)
            assert own.loads[window].sum(axis=0).tolist() == expected.tolist()
    assert "letters 0 to 2, numbers 3 to 5" in trace.header.note


def test_results_are_replays_of_the_trace(done):
    rows = done.result["rows"]
    assert [(r["ranks"], r["policy"]) for r in rows] == [(n, p) for n in (4, 8) for p in POLICIES]
    for row in rows:
        settings = {"policies": [row["policy"]], "ranks": [row["ranks"]]}
        (case,) = cases(done.trace, **settings, slots=[1], history=[1])
        means = replayed(done.trace, case).means()
        if row["ranks"] == 8:  # the sources of rows are dealt out differently
            del means["remote"]
        assert {name: row[name] for name in means} == pytest.approx(means)
    content = done.result
    assert (content["family"], content["experts"], content["top_k"]) == ("qwen3_moe", 16, 8)
    assert (content["layers"], content["notes"]) == ([0, 1, 2, 3], [])


def test_imbalance_by_layer_and_by_text(done):
    trace, result = done.trace, done.result
    (case,) = cases(trace, policies=["ultraep"], slots=[1], ranks=[4], history=[1])
    outcome = replayed(trace, case)
    groups = {"layer": trace.layer, "text": np.array(list(TEXTS))[trace.step // 3]}
    for noun, of_record in groups.items():
        rows = [row for row in result[f"by_{noun}"] if row["ranks"] == 4]
        assert [row[noun] for row in rows] == sorted(set(of_record.tolist()))
        for row in rows:
            own = of_record == row[noun]
            expected = {"before": outcome.before[own].mean(), "after": outcome.after[own].mean()}
            assert {name: row[name] for name in expected} == pytest.approx(expected)
    head, lines = change_table(done.findings.by_layer, most=2)
    worst = sorted(result["by_layer"][::2], key=lambda row: -row["before"])[:2]
    assert head == ["layer", "EP4", "EP8"]
    assert {line[0] for line in lines} == {str(row["layer"]) for row in worst}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ep": "8,16"}, "--ep 16: ranks must lie between 1 and the 8 experts"),
        ({"slots": 9}, "slots must lie between 0 and 8, got 9"),
        ({"layers": "1,9"}, "--layers 9: layers with experts are 0, 1"),
        ({"device": "abacus"}, "--device must be cpu, cuda or cuda:N, got 'abacus'"),
        ({"dtype": "int4"}, "--dtype must be one of float32"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Inspection(InspectOptions(**({"random": "mixtral", "ep": "4"} | options)))


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
