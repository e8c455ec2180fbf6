"""A forward pass window by window equals an ordinary forward pass; texts become windows."""

import pytest
import torch
from inspect_models import routing_of, save_tokenizer, smaller_config

from ultraep.errors import ConfigError, FileError
from ultraep.tools.inspect import checkpoint
from ultraep.tools.inspect.blocks import num_experts, run_windows
from ultraep.tools.inspect.checkpoint import FAMILIES, RandomModel
from ultraep.tools.inspect.texts import first_tokens, texts_of, tokenizer_of, windows_of

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) & set(transformers.CONFIG_MAPPING)))
def test_windows_have_the_routing_of_the_whole_batch(family, monkeypatch):
    monkeypatch.setattr(checkpoint, "small_config", smaller_config)
    opened = RandomModel(family, device=CPU, dtype=torch.float64, seed=1)
    opened.model.set_experts_implementation("eager")  # supports float64
    anatomy, ids = opened.anatomy, torch.arange(60).reshape(5, 12) * 31 % 4000 + 3
    with routing_of(opened.model) as whole, torch.no_grad():
        anatomy.decoder(input_ids=ids, use_cache=False)
    calls, blocks = [], list(anatomy.blocks)
    with routing_of(opened.model) as routing:
        windows = ids.split([2, 1, 2])
        run_windows(anatomy, windows, opened.loaded, lambda *c: calls.append(c), blocks[-1])
    assert whole
    assert all(torch.equal(routing[name], whole[name]) for name in whole)
    assert calls == [(name, number) for name in blocks for number in range(3)]
    assert not any("forward" in vars(block) for block in anatomy.blocks.values())


@pytest.mark.parametrize(
    ("family", "experts", "layers"),
    [("mixtral", 8, [0, 1, 2, 3]), ("gpt_oss", 128, [0, 1, 2, 3]), ("deepseek_v3", 256, [1, 2, 3])],
)
def test_random_models_have_the_experts_of_their_family(family, experts, layers):
    anatomy = RandomModel(family, device=CPU, dtype=None, seed=0).anatomy
    assert list(anatomy.experts) == layers
    assert num_experts(anatomy.experts[1]) == experts
    assert list(anatomy.blocks) == [f"model.layers.{number}" for number in range(4)]


# -- texts ---------------------------------------------------------------------------------------


def test_the_tokenizer_of_a_checkpoint_is_used_unless_damaged(tmp_path):
    assert tokenizer_of(tmp_path) is None
    vocabulary = save_tokenizer(tmp_path)
    assert tokenizer_of(tmp_path)("fox dog unheard") == [vocabulary["fox"], vocabulary["dog"], 0]
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuchTokenizer"}')
    with pytest.raises(FileError, match=r"cannot read its tokenizer.*\Z"):
        tokenizer_of(tmp_path)


def test_no_more_text_is_encoded_than_needed():
    lengths = []

    def encode(text):
        lengths.append(len(text))
        return list(range(len(text) // 20))

    assert len(first_tokens("x" * 100_000, encode, 50)) == 50
    assert lengths == [400, 800, 1600]
    assert len(first_tokens("x" * 100, encode, 50)) == 5


@pytest.mark.parametrize(
    ("window", "sequence", "shapes"), [(32, 16, [(2, 16)] * 3), (8, 16, [(1, 8)] * 12)]
)
def test_a_text_is_cut_into_windows(window, sequence, shapes):
    sizes = {"tokens": 100, "window": window, "sequence": sequence}
    (span,), windows = windows_of({"text": "x" * 100}, lambda text: range(len(text)), **sizes)
    assert [part.shape for part in windows] == shapes
    assert [part[0, 0] for part in windows] == [window * number for number in range(len(windows))]
    assert (span.begin, span.end, span.tokens) == (0, len(shapes) - 1, 96)


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
