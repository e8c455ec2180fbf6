"""Import transformers on first use, keep it offline, and turn its errors into `FileError`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from ultraep.errors import ConfigError, FileError, UltraEPError
from ultraep.supported import TRANSFORMERS

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
LONGEST = 300  # characters of an error message


def transformers(part: str = "") -> Any:
    """Import transformers, or one of its submodules; quiet and offline."""
    TRANSFORMERS.check()
    os.environ.update(SETTINGS)
    library = import_module("transformers")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return import_module(f"transformers.{part}") if part else library


def check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: not a directory; pass the directory of a checkpoint on this machine, as "
            "written by save_pretrained (nothing is downloaded)"
        )


@contextmanager
def library_errors(path: Path, message: str) -> Iterator[None]:
    """Turn any error of a library about a user's file into a `FileError`.

    Libraries raise any type; tokenizers raises bare Exceptions.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except UltraEPError:
        raise
    except Exception as error:
        raise FileError(f"{path}: {message}: {one_line(error)}") from error


def one_line(error: BaseException | str) -> str:
    """Return the message of an error in one line, without tracebacks inside of it."""
    text = str(error).partition("\nException raised from")[0]  # torch appends a C++ traceback
    if "Traceback (most recent call last)" in text:
        text = text.strip().splitlines()[-1]
    words = " ".join(text.split())[:LONGEST]
    return words if isinstance(error, str) else f"{type(error).__name__}: {words}".rstrip(": ")
