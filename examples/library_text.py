"""The text of all examples: Python's standard library, in subjects that load different experts."""

from __future__ import annotations

from functools import partial

import ultraep
from ultraep_tools.tiny.text import Text, files

SUBJECTS = {
    "prose": ("pydoc_data/topics.py",),
    "tables": ("encodings/cp*.py", "encodings/mac_*.py"),
    "networks": ("asyncio/*.py", "http/*.py", "urllib/*.py"),
    "markup": ("html/*.py", "xml/*/*.py"),
    "arithmetic": ("_pydecimal.py", "statistics.py", "fractions.py", "random.py", "datetime.py"),
    "mail": ("email/*.py", "mailbox.py", "smtplib.py", "imaplib.py"),
}


def library_bytes() -> bytes:
    """Return the text of all subjects."""
    texts = [files(*patterns) for patterns in SUBJECTS.values()]
    if not any(texts):
        raise ultraep.FileError("no text in Python's library")
    return b"\n".join(data for data in texts if data)


def library_text() -> Text:
    """Return sequences of all subjects, the same on every machine with the same Python."""
    return Text({name: partial(files, *patterns) for name, patterns in SUBJECTS.items()})
