"""Text of Python's own library, as bytes, by subject.

Subjects use different bytes and therefore different experts, so a change of subject shifts the
loads. The text is the same on every machine with the same version of Python.

Shapes: B sequences, T bytes.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from ultraep.errors import FileError

SUBJECTS = {  # files of the library, in the order of the training
    "code": ("asyncio/*.py", "http/*.py", "email/*.py", "json/*.py", "concurrent/*/*.py"),
    "prose": ("LICENSE.txt", "pydoc_data/topics.py"),
    "tables": ("encodings/cp*.py", "encodings/mac_*.py", "html/entities.py"),
}
LEAST = 1 << 14  # bytes of the shortest usable subject
HELD_OUT = 10  # the last tenth of each subject is held out
MAIN = 0.8  # share of a step's main subject


def library_text() -> dict[str, bytes]:
    """Return the text of every subject; some systems install only a part of the library."""
    root, texts = Path(sysconfig.get_path("stdlib")), {}
    for name, patterns in SUBJECTS.items():
        paths = [path for pattern in patterns for path in sorted(root.glob(pattern))]
        data = b"\n".join(path.read_bytes() for path in paths)
        if len(data) >= LEAST:
            texts[name] = data
    if not texts:
        raise FileError(f"no text in Python's library, {root}")
    return texts


class Text:
    """Sequences of several subjects; by default, of Python's library."""

    def __init__(self, texts: Mapping[str, bytes] | None = None) -> None:
        texts = texts or library_text()
        self.names = list(texts)
        self.training, self.held_out = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name, data in texts.items():
            every, rest = (
                torch.frombuffer(bytearray(data), dtype=torch.uint8),
                len(data) // HELD_OUT,
            )
            self.training[name], self.held_out[name] = every[:-rest], every[-rest:]

    def sequences(
        self, rng: np.random.Generator, subjects: list[str], length: int, *, held_out: bool = False
    ) -> torch.Tensor:
        """[B, T] token ids of a random piece of every listed subject."""
        texts, pieces = self.held_out if held_out else self.training, []
        for subject in subjects:
            begin = int(rng.integers(len(texts[subject]) - length + 1))
            pieces.append(texts[subject][begin : begin + length].long())
        return torch.stack(pieces)

    def main_subject(self, step: int, period: int) -> str:
        """Return the main subject of a step; it changes every `period` steps."""
        return self.names[step // period % len(self.names)]

    def subjects_at(
        self, rng: np.random.Generator, step: int, count: int, period: int
    ) -> list[str]:
        """Draw `count` subjects, most of them the main subject of the step."""
        main = self.main_subject(step, period)
        return [main if rng.random() < MAIN else str(rng.choice(self.names)) for _ in range(count)]
