"""Text of Python's own library, as bytes, by subject.

Subjects use different bytes and therefore different experts, so a change of subject shifts the
loads. The text is the same on every machine with the same version of Python.

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

LEAST = 1 << 14  # bytes of the shortest usable subject
HELD_OUT = 10  # the last tenth of each subject is held out
MAIN = 0.8  # share of a step's main subject
DOCUMENTED = ("argparse.py", "decimal.py", "_pydecimal.py", "difflib.py", "tarfile.py", "typing.py")


class Text:
    """The subjects, each as one long tensor of bytes."""

    def __init__(self, subjects: Mapping[str, Callable[[], bytes]] | None = None) -> None:
        texts = {name: bytearray(read()) for name, read in (subjects or SUBJECTS).items()}
        texts = {name: data for name, data in texts.items() if len(data) >= LEAST}
        if not texts:
            raise FileError(f"no text in Python's library, {sysconfig.get_path('stdlib')}")
        self.names = list(texts)
        # The bytes for training and the held-out bytes of every subject:
        self.training, self.held_out = list[torch.Tensor](), list[torch.Tensor]()
        for data in texts.values():
            every, rest = torch.frombuffer(data, dtype=torch.uint8), len(data) // HELD_OUT
            self.training.append(every[:-rest])
            self.held_out.append(every[-rest:])

    def sequences(
        self, rng: np.random.Generator, subjects: list[int], length: int, *, held_out: bool = False
    ) -> torch.Tensor:
        """[B, T] token ids of a random piece of every listed subject."""
        pieces = []
        for subject in subjects:
            data = self.held_out[subject] if held_out else self.training[subject]
            begin = int(rng.integers(len(data) - length + 1))
            pieces.append(data[begin : begin + length].long())
        return torch.stack(pieces)

    def main(self, step: int, period: int) -> int:
        """Return the main subject of a step; it changes every `period` steps."""
        return step // period % len(self.names)

    def shifting(self, rng: np.random.Generator, step: int, count: int, period: int) -> list[int]:
        """Draw `count` subjects, most of them the main subject of the step."""
        drawn = rng.integers(len(self.names), size=count)
        is_main = rng.random(count) < MAIN
        return [int(subject) for subject in np.where(is_main, self.main(step, period), drawn)]


def files(*patterns: str) -> bytes:
    """Return all matching files of the library, ordered by pattern and name."""
    return b"\n".join(path.read_bytes() for path in _matching(patterns))


def _matching(patterns: tuple[str, ...]) -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return [path for pattern in patterns for path in sorted(root.glob(pattern))]


def prose() -> bytes:
    """Return English text: the licence, Python's help, and docstrings of modules."""
    return b"\n\n".join([files("LICENSE.txt"), _topics(), _docstrings(*DOCUMENTED)])


def _topics() -> bytes:
    """Return the language topics of `help()`, if they are installed."""
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
    """Return tables: code pages, entities, opcodes, characters with their properties."""
    pages = files("encodings/cp*.py", "encodings/mac_*.py", "html/entities.py", "opcode.py")
    return pages + _characters()


def _characters() -> bytes:
    """Return a line for every named character: number, name, category, direction."""
    lines = []
    for code in range(min(0x3000, sys.maxunicode)):
        name = unicodedata.name(chr(code), "")
        if name:
            category, combining = unicodedata.category(chr(code)), unicodedata.combining(chr(code))
            direction = unicodedata.bidirectional(chr(code))
            lines.append(f"{code:04X};{name};{category};{combining};{direction}")
    return "\n".join(lines).encode()


SUBJECTS: dict[str, Callable[[], bytes]] = {  # in the order of the training
    "code": partial(
        files, "asyncio/*.py", "http/*.py", "email/*.py", "json/*.py", "concurrent/*/*.py"
    ),
    "prose": prose,
    "tables": tables,
}
