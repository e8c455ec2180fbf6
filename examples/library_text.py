"""Text that every machine has: Python's own library, as bytes, by subject.

Subjects differ in their bytes, and so in the experts that they load. A text that moves from one
to the next keeps moving the load. It is the same on every machine with the same Python.

Shapes: B sequences, T bytes.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch

import ultraep

HELD_OUT = 10  # one byte of so many, at the end of each subject, is not trained on
MAIN = 0.8  # share of the subject of the hour
SUBJECTS = {
    "prose": ("pydoc_data/topics.py",),
    "tables": ("encodings/cp*.py", "encodings/mac_*.py"),
    "networks": ("asyncio/*.py", "http/*.py", "urllib/*.py"),
    "markup": ("html/*.py", "xml/*/*.py"),
    "arithmetic": ("_pydecimal.py", "statistics.py", "fractions.py", "random.py", "datetime.py"),
    "mail": ("email/*.py", "mailbox.py", "smtplib.py", "imaplib.py"),
}


def read_subjects() -> list[bytes]:
    """All files of each subject."""
    root = Path(sysconfig.get_path("stdlib"))
    listed = [
        [path for pattern in patterns for path in sorted(root.glob(pattern))]
        for patterns in SUBJECTS.values()
    ]
    found = [b"\n".join(path.read_bytes() for path in paths) for paths in listed if paths]
    if not found:
        raise ultraep.FileError(f"no text in Python's library, {root}")
    return found


class Text:
    """The subjects of this machine, each as one long tensor of bytes."""

    def __init__(self) -> None:
        read = read_subjects()
        self.subjects = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in read]

    def sequences(
        self, rng: np.random.Generator, subjects: list[int], length: int, *, held_out: bool = False
    ) -> torch.Tensor:
        """[B, T] one random piece of each of these subjects, as token ids."""
        pieces = []
        for subject in subjects:
            data = self.subjects[subject]
            border = len(data) - len(data) // HELD_OUT
            data = data[border:] if held_out else data[:border]
            begin = int(rng.integers(len(data) - length + 1))
            pieces.append(data[begin : begin + length].long())
        return torch.stack(pieces)

    def shifting(self, rng: np.random.Generator, step: int, count: int, period: int) -> list[int]:
        """`count` subjects, of which most are the one of this step; it changes with the period."""
        main, others = (
            step // period % len(self.subjects),
            rng.integers(len(self.subjects), size=count),
        )
        return np.where(rng.random(count) < MAIN, main, others).tolist()
