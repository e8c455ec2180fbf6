"""One forward pass in which blocks take window after window is an ordinary forward pass."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from inspect_models import routing_of, save_tokenizer, smaller_config

from ultraep.errors import ConfigError, FileError
from ultraep.tools.inspect import families
from ultraep.tools.inspect.anatomy import Anatomy, num_experts
from ultraep.tools.inspect.families import FAMILIES, RandomModel
from ultraep.tools.inspect.texts import (
    cut,
    excerpts,
    first_tokens,
    texts_of,
    tokenizer_of,
)
from ultraep.tools.inspect.windows import joined, run_windows, split

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) & set(transformers.CONFIG_MAPPING)))
def test_windows_give_the_routing_of_the_whole(family, monkeypatch):
    monkeypatch.setattr(families, "small_config", smaller_config)
    opened = RandomModel(family, device=CPU, dtype=torch.float64, seed=1)
    opened.model.set_experts_implementation("eager")  # the others know no float64
    anatomy, ids = opened.anatomy, torch.arange(60).reshape(5, 12) * 31 % 4000 + 3
    with routing_of(opened.model) as whole, torch.no_grad():
        anatomy.decoder(input_ids=ids, use_cache=False)
    seen = []
    with routing_of(opened.model) as found:
        run_windows(
            anatomy,
            ids.split([2, 1, 2]),
            lambda _: nullcontext(),
            lambda *told: seen.append(told),
            [*anatomy.blocks][-1],
        )
    assert whole
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert seen == [(name, number) for name in anatomy.blocks for number in range(3)]
    assert not any("forward" in vars(block) for block in anatomy.blocks.values())


def test_families_keep_their_experts():
    found = {name: Anatomy.of(RandomModel(name, device=CPU, dtype=None, seed=0).model)
             for name in ("mixtral", "gpt_oss", "deepseek_v3")}  # fmt: skip
    counts = {name: num_experts(next(iter(one.experts.values()))) for name, one in found.items()}
    assert counts == {"mixtral": 8, "gpt_oss": 128, "deepseek_v3": 256}
    assert list(found["deepseek_v3"].experts) == [1, 2, 3]  # the first layer is dense
    assert list(found["deepseek_v3"].blocks) == [f"model.layers.{number}" for number in range(4)]


def test_what_is_split_is_put_together_again():
    value = (torch.arange(10).reshape(5, 2), {"mask": torch.ones(5, 1, 2, 2), "none": None}, 3)
    parts = split(value, [2, 3])
    assert parts[1][0].tolist() == [[4, 5], [6, 7], [8, 9]]
    assert parts[0][1]["mask"].shape == (2, 1, 2, 2)
    assert parts[0][2] == 3
    assert torch.equal(joined([part[0] for part in parts]), value[0])
    shared = torch.ones(1, 5)  # one row for all sequences
    assert split(shared, [2, 3])[1] is shared


# -- texts ---------------------------------------------------------------------------------------


def test_the_tokenizer_of_a_checkpoint_is_used(tmp_path):
    vocabulary = save_tokenizer(tmp_path)
    assert tokenizer_of(tmp_path)("fox dog unheard") == [vocabulary["fox"], vocabulary["dog"], 0]
    assert tokenizer_of(tmp_path.parent / "elsewhere") is None


def test_a_broken_tokenizer_is_one_line(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuchTokenizer"}')
    with pytest.raises(FileError, match="cannot read its tokenizer") as error:
        tokenizer_of(tmp_path)
    assert "\n" not in str(error.value)


def test_no_more_is_encoded_than_needed():
    lengths = []

    def encode(text):
        lengths.append(len(text))
        return list(range(len(text) // 20))

    assert len(first_tokens("x" * 100_000, encode, 50)) == 50
    assert lengths == [400, 800, 1600]
    assert len(first_tokens("x" * 100, encode, 50)) == 5


def test_windows_of_a_text():
    ids = np.arange(100)
    assert [w.shape for w in cut(ids, window=32, sequence=16)] == [(2, 16)] * 3
    assert [w.shape for w in cut(ids, window=8, sequence=16)] == [(1, 8)] * 12
    assert cut(ids, window=32, sequence=16)[1][0, 0] == 32


def test_texts_have_sequences_of_one_length_and_names_of_their_own(tmp_path):
    for folder, words in (("a", "one two three four"), ("b", "five " * 100)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_text(words)
    files = [tmp_path / folder / "text.txt" for folder in "ab"]
    made = excerpts(
        texts_of(files),
        lambda text: [len(word) for word in text.split()],
        tokens=64,
        window=16,
        sequence=8,
    )
    assert [one.name for one in made] == ["text", str(files[1])]
    assert [len(one.windows) for one in made] == [1, 4]
    assert {window.shape[1] for one in made for window in one.windows} == {4}
    with pytest.raises(ConfigError, match="is given twice"):
        texts_of([files[0], files[1], files[1]])


def test_an_empty_text_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(FileError, match="the text empty is empty"):
        excerpts(texts_of([tmp_path / "empty.txt"]), list, tokens=8, window=8, sequence=8)
    with pytest.raises(ConfigError, match="--window must be at least 1, got 0"):
        excerpts({"a": "b"}, list, tokens=8, window=0, sequence=8)
