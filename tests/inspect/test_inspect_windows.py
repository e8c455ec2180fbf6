"""A forward pass window by window equals an ordinary forward pass; texts become windows."""

import pytest
import torch
from inspect_models import routing_of, save_tokenizer, smaller_config

from ultraep.errors import ConfigError, FileError
from ultraep.tools.inspect import checkpoint
from ultraep.tools.inspect.blocks import run_windows
from ultraep.tools.inspect.checkpoint import FAMILIES, RandomModel
from ultraep.tools.inspect.texts import texts_of, tokenizer_of, windows_of

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


# -- texts ---------------------------------------------------------------------------------------


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
