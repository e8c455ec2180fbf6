"""Texts as windows of tokens.

A window is a microbatch: some sequences of one text. Without files, the texts are code, prose and
tables from Python's own library. The checkpoint's tokenizer encodes them; without a tokenizer,
every word becomes a token by its hash.

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
from ultraep_tools.demo.text import library_text
from ultraep_tools.inspect.library import library_errors, transformers

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
CHARACTERS = 8  # per token, at first; more text is encoded if it has too few tokens
MOST_TOKENIZER = 128 << 20  # bytes of a file
RESERVED = 3  # ids of padding, begin, end

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class TextSpan:
    """The windows of a text, `begin` to `end` inclusive, which are steps of the trace."""

    name: str
    begin: int
    end: int
    tokens: int


def texts_of(files: Sequence[Path], tokens: int = 0) -> dict[str, str]:
    """Return the beginning of every file by name; without files, texts of Python's library.

    tokens: tokens that the inspection reads from every text.
    """
    if not files:
        return {name: data.decode("utf-8", "replace") for name, data in library_text().items()}
    texts: dict[str, str] = {}
    for file in files:
        if files.count(file) > 1:
            raise ConfigError(f"--text {file} is given twice; pass every file once")
        name = file.stem if file.stem not in texts else str(file)
        texts[name] = read_beginning(file, max(MOST_TEXT, CHARACTERS * tokens))
    return texts


def tokenizer_of(folder: Path) -> Encode | None:
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not files:
        return None
    for file in files:
        check_size(file, MOST_TOKENIZER)
    with library_errors(folder, "transformers cannot read its tokenizer"):
        tokenizer: Any = transformers().AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )

    def encode(text: str) -> Sequence[int]:
        with library_errors(folder, "its tokenizer cannot encode a text"):
            ids: Sequence[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    return encode


def hashed_words(vocabulary: int) -> Encode:
    """Return an encoder with one token per word and sign, the same on every machine.

    >>> hashed_words(1000)("to be, or not to be")
    [408, 445, 185, 34, 792, 346, 445]
    """

    def encode(text: str) -> list[int]:
        words = re.findall(r" ?\w+|\s+|[^\w\s]", text)
        reserved = min(RESERVED, vocabulary - 1)
        return [reserved + zlib.crc32(word.encode()) % (vocabulary - reserved) for word in words]

    return encode


def windows_of(
    texts: dict[str, str], encode: Encode, *, tokens: int, window: int, sequence: int
) -> tuple[list[TextSpan], list[IntArray]]:
    """Return the first windows of every text, [B, T] each, and the span of every text in them.

    All sequences have one length, at most the tokens of the shortest text.
    """
    sizes = {"--tokens": tokens, "--window": window, "--sequence-length": sequence}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    ids_of = {name: first_tokens(text, encode, tokens) for name, text in texts.items()}
    for name, ids in ids_of.items():
        if not len(ids):
            raise FileError(f"the text {name} is empty; pass a file with text")
    length = min(sequence, *map(len, ids_of.values()))
    spans: list[TextSpan] = []
    windows: list[IntArray] = []
    for name, ids in ids_of.items():
        own = cut(ids, window=window, sequence=length)
        end = len(windows) + len(own) - 1
        spans.append(TextSpan(name, len(windows), end, sum(part.size for part in own)))
        windows += own
    return spans, windows


def first_tokens(text: str, encode: Encode, count: int) -> IntArray:
    """Return up to `count` tokens, and encode no more text than needed."""
    characters = CHARACTERS * count
    while True:
        ids = np.asarray(encode(text[:characters]), dtype=np.int64)
        if len(ids) >= count or characters >= len(text):
            return ids[:count]
        characters *= 2


def cut(ids: IntArray, *, window: int, sequence: int) -> list[IntArray]:
    """Cut tokens into windows of whole sequences, and drop the rest at the end.

    A text shorter than a window is one window.

    >>> [part.shape for part in cut(np.arange(90), window=40, sequence=10)]
    [(4, 10), (4, 10)]
    >>> [part.shape for part in cut(np.arange(25), window=40, sequence=10)]
    [(2, 10)]
    """
    length = min(sequence, window)
    sequences = ids[: len(ids) // length * length].reshape(-1, length)
    rows = min(window // length, len(sequences))
    return [sequences[begin : begin + rows] for begin in range(0, len(sequences) - rows + 1, rows)]
