"""The text of all examples: Python's own library, by subjects that load other experts each."""

from __future__ import annotations

from functools import partial

import ultraep
from ultraep.tools.tiny.text import Text, files

SUBJECTS = {
    "prose": ("pydoc_data/topics.py",),
    "tables": ("encodings/cp*.py", "encodings/mac_*.py"),
    "networks": ("asyncio/*.py", "http/*.py", "urllib/*.py"),
    "markup": ("html/*.py", "xml/*/*.py"),
    "arithmetic": ("_pydecimal.py", "statistics.py", "fractions.py", "random.py", "datetime.py"),
    "mail": ("email/*.py", "mailbox.py", "smtplib.py", "imaplib.py"),
}


def library_bytes() -> bytes:
    """All subjects, one after the other."""
    found = [files(*patterns) for patterns in SUBJECTS.values()]
    if not any(found):
        raise ultraep.FileError("no text in Python's library")
    return b"\n".join(data for data in found if data)


def library_text() -> Text:
    """Sequences of these subjects; the same on every machine with the same Python."""
    return Text({name: partial(files, *patterns) for name, patterns in SUBJECTS.items()})
