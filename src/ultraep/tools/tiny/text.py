"""Text that every machine has: Python's own library, as bytes, by subject.

Subjects differ in their bytes, and so in the experts that they load. A text that moves from one
to the next keeps moving the load. It is the same on every machine with the same Python.

Shapes: B sequences, T bytes.
"""

from __future__ import annotations

import ast
import importlib
import sys
import sysconfig
import unicodedata
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ultraep.errors import FileError

LEAST = 1 << 14  # bytes of a subject worth having
HELD_OUT = 10  # one byte of so many, at the end of each subject, is not trained on
MAIN = 0.8  # share of the subject of the hour
TALKATIVE = ("argparse.py", "decimal.py", "_pydecimal.py", "difflib.py", "tarfile.py", "typing.py")


class Text:
    """The subjects of this machine, each as one long tensor of bytes."""

    def __init__(self, subjects: Mapping[str, Callable[[], bytes]] | None = None) -> None:
        texts = {name: bytearray(read()) for name, read in (subjects or SUBJECTS).items()}
        texts = {name: data for name, data in texts.items() if len(data) >= LEAST}
        if not texts:
            raise FileError(f"no text in Python's library, {sysconfig.get_path('stdlib')}")
        self.names = list(texts)
        self._all = [torch.frombuffer(data, dtype=torch.uint8) for data in texts.values()]

    def sequences(
        self, rng: np.random.Generator, subjects: list[int], length: int, *, held_out: bool = False
    ) -> torch.Tensor:
        """[B, T] one random piece of each of these subjects, as token ids."""
        pieces = []
        for subject in subjects:
            data = self._all[subject]
            border = len(data) - len(data) // HELD_OUT
            data = data[border:] if held_out else data[:border]
            begin = int(rng.integers(len(data) - length + 1))
            pieces.append(data[begin : begin + length].long())
        return torch.stack(pieces)

    def held_out(self) -> dict[str, bytes]:
        """The part of every subject that is not trained on."""
        parts = (data[len(data) - len(data) // HELD_OUT :] for data in self._all)
        return {name: bytes(part.tolist()) for name, part in zip(self.names, parts, strict=True)}

    def main(self, step: int, period: int) -> int:
        """The subject of a step; it changes every `period` steps."""
        return step // period % len(self.names)

    def shifting(self, rng: np.random.Generator, step: int, count: int, period: int) -> list[int]:
        """`count` subjects, of which most are the one of this step."""
        others = rng.integers(len(self.names), size=count)
        mostly = rng.random(count) < MAIN
        return [int(s) for s in np.where(mostly, self.main(step, period), others)]


def files(*patterns: str) -> bytes:
    """All files of the library that match, in the order of the patterns, then of their names."""
    return b"\n".join(path.read_bytes() for path in _matching(patterns))


def _matching(patterns: tuple[str, ...]) -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return [path for pattern in patterns for path in sorted(root.glob(pattern))]


def prose() -> bytes:
    """English: the licence, Python's help, and what modules say about themselves."""
    return b"\n\n".join([files("LICENSE.txt"), _topics(), _docstrings(*TALKATIVE)])


def _topics() -> bytes:
    """What `help()` knows about the language, where it is installed."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError:
        return b""
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _docstrings(*patterns: str) -> bytes:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [
        node for path in _matching(patterns) for node in ast.walk(ast.parse(path.read_bytes()))
    ]
    docstrings = [ast.get_docstring(node) for node in nodes if isinstance(node, kinds)]
    return "\n\n".join(filter(None, docstrings)).encode()


def tables() -> bytes:
    """Rows and columns: code pages, entities, opcodes, characters with their properties."""
    pages = files("encodings/cp*.py", "encodings/mac_*.py", "html/entities.py", "opcode.py")
    return pages + _characters()


def _characters() -> bytes:
    """A line for every named character of the first planes: number, name, kind, direction."""
    lines = []
    for code in range(min(0x3000, sys.maxunicode)):
        name = unicodedata.name(chr(code), "")
        if name:
            kind, way = unicodedata.category(chr(code)), unicodedata.bidirectional(chr(code))
            lines.append(f"{code:04X};{name};{kind};{unicodedata.combining(chr(code))};{way}")
    return "\n".join(lines).encode()


SUBJECTS: dict[str, Callable[[], bytes]] = {  # in the order of the training
    "code": partial(
        files, "asyncio/*.py", "http/*.py", "email/*.py", "json/*.py", "concurrent/*/*.py"
    ),
    "prose": prose,
    "tables": tables,
}
