"""Texts -> windows of tokens.

A window is a microbatch: some sequences of one text. Without files, the texts are code, prose and
tables of Python's library. The checkpoint's own tokenizer makes tokens of them; a model without a
tokenizer gets a token for every word, by its hash.

Shapes: B sequences of a window, T tokens of a sequence.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError, FileError
from ultraep.files.reading import MOST_TEXT, check_size, read_beginning
from ultraep.tools.inspect.library import Understood, transformers
from ultraep.tools.tiny.text import SUBJECTS

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
CHARACTERS = 8  # of a token, at first; more of the text is taken if they were too few
MOST_TOKENIZER = 128 << 20  # bytes of a file
RESERVED = 3  # ids that are no words: padding, begin, end

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, eq=False)
class Excerpt:
    """The windows that are read of one text."""

    name: str
    windows: list[IntArray]  # [B, T] token ids of each

    @property
    def tokens(self) -> int:
        """Tokens of all windows."""
        return sum(window.size for window in self.windows)


def texts_of(files: Sequence[Path], tokens: int = 0) -> dict[str, str]:
    """Return the beginning of every file by its name; without files, the texts of this machine.

    tokens: how many of every text will be read.
    """
    if not files:
        return {name: read().decode("utf-8", "replace") for name, read in SUBJECTS.items()}
    twice = next((file for file in files if files.count(file) > 1), None)
    if twice is not None:
        raise ConfigError(f"--text {twice} is given twice")
    texts: dict[str, str] = {}
    for file in files:
        name = file.stem if file.stem not in texts else str(file)
        texts[name] = read_beginning(file, max(MOST_TEXT, CHARACTERS * tokens))
    return texts


# -- tokens --------------------------------------------------------------------------------------


def tokenizer_of(folder: Path) -> Encode | None:
    """The tokenizer of a checkpoint; None if it has none."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            check_size(folder / name, MOST_TOKENIZER)
    with Understood(folder, "transformers cannot read its tokenizer"):
        tokenizer: Any = transformers().AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )

    def encode(text: str) -> Sequence[int]:
        with Understood(folder, "its tokenizer cannot encode a text"):
            ids: Sequence[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    return encode


def hashed_words(vocabulary: int) -> Encode:
    """A token for every word and every sign, the same on every machine.

    >>> hashed_words(1000)("to be, or not to be")
    [408, 445, 185, 34, 792, 346, 445]
    """

    def encode(text: str) -> list[int]:
        words = re.findall(r" ?\w+|\s+|[^\w\s]", text)
        reserved = min(RESERVED, vocabulary - 1)
        return [reserved + zlib.crc32(word.encode()) % (vocabulary - reserved) for word in words]

    return encode


def first_tokens(text: str, encode: Encode, count: int) -> IntArray:
    """Up to so many tokens from the beginning of a text; no more of it is encoded than needed."""
    characters = CHARACTERS * count
    while True:
        ids = np.asarray(encode(text[:characters]), dtype=np.int64)
        if len(ids) >= count or characters >= len(text):
            return ids[:count]
        characters *= 2


# -- windows -------------------------------------------------------------------------------------


def cut(ids: IntArray, *, window: int, sequence: int) -> list[IntArray]:
    """Windows of whole sequences; what is left over at the end is not read.

    A text that is shorter than a window is one window, one that is shorter than a sequence one
    sequence.

    >>> [window.shape for window in cut(np.arange(90), window=40, sequence=10)]
    [(4, 10), (4, 10)]
    >>> [window.shape for window in cut(np.arange(25), window=40, sequence=10)]
    [(2, 10)]
    """
    length = min(sequence, window, len(ids))
    lines = ids[: len(ids) // length * length].reshape(-1, length)
    rows = min(max(window // length, 1), len(lines))
    return [lines[begin : begin + rows] for begin in range(0, len(lines) - rows + 1, rows)]


def excerpts(
    texts: dict[str, str], encode: Encode, *, tokens: int, window: int, sequence: int
) -> list[Excerpt]:
    """The first windows of every text. All of them have sequences of one length."""
    for name, value in (
        ("--tokens", tokens),
        ("--window", window),
        ("--sequence-length", sequence),
    ):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    ids_of = {name: first_tokens(text, encode, tokens) for name, text in texts.items()}
    empty = next((name for name, ids in ids_of.items() if not len(ids)), None)
    if empty is not None:
        raise FileError(f"the text {empty} is empty")
    length = min(sequence, *(len(ids) for ids in ids_of.values()))
    return [Excerpt(name, cut(ids, window=window, sequence=length)) for name, ids in ids_of.items()]
