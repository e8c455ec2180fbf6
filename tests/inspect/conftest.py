"""A small checkpoint and texts, which nobody changes."""

import pytest

pytest.importorskip("transformers")

from inspect_models import TEXTS, save_model, save_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A small qwen3_moe with a tokenizer."""
    folder = save_model("qwen3_moe", tmp_path_factory.mktemp("models") / "small")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def text_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    return [folder / f"{name}.txt" for name in TEXTS]
