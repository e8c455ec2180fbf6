"""Texts become windows of tokens."""

import pytest
from inspect_models import save_tokenizer

from ultraep.errors import ConfigError, FileError
from ultraep.tools.inspect.texts import texts_of, tokenizer_of, windows_of

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
