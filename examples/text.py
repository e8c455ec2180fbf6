"""Text that every machine has: sources of Python's standard library, as bytes, by subject.

Subjects differ in their bytes, and so in the experts that they load: prose, tables of characters,
arithmetic, markup, mail, networks. A text that moves from one to the next keeps moving the load.

Shapes: B sequences, T bytes.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch

SUBJECTS = {
    "prose": ("pydoc_data/topics.py",),
    "tables": ("encodings/cp*.py", "encodings/mac_*.py"),
    "networks": ("asyncio/*.py", "http/*.py", "urllib/*.py"),
    "markup": ("html/*.py", "xml/*/*.py"),
    "arithmetic": ("_pydecimal.py", "statistics.py", "fractions.py", "random.py", "datetime.py"),
    "mail": ("email/*.py", "mailbox.py", "smtplib.py", "imaplib.py"),
}
LEAST = 1 << 14  # bytes of a subject worth having
HELD_OUT = 10  # one byte of so many, at the end of each subject, is not trained on


class Text:
    """The subjects of this machine, each as one long tensor of bytes."""

    def __init__(self) -> None:
        found = {name: _read(patterns) for name, patterns in SUBJECTS.items()}
        subjects = {name: data for name, data in found.items() if len(data) >= LEAST}
        if not subjects:
            raise FileNotFoundError(f"no sources in {sysconfig.get_path('stdlib')}")
        self.names = list(subjects)
        self._all = [torch.frombuffer(data, dtype=torch.uint8) for data in subjects.values()]

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

    def shifting(self, rng: np.random.Generator, step: int, count: int, period: int) -> list[int]:
        """`count` subjects: most are the one of this step, which changes every `period` steps."""
        main = step // period % len(self.names)
        others = rng.integers(len(self.names), size=count)
        return [int(s) for s in np.where(rng.random(count) < 0.8, main, others)]


def _read(patterns: tuple[str, ...]) -> bytearray:
    """All files that match, in the order of the patterns, then of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    return bytearray(
        b"\n".join(path.read_bytes() for pattern in patterns for path in sorted(root.glob(pattern)))
    )
