"""Import transformers when it is needed, keep it off the network, and turn its errors into ours."""

from __future__ import annotations

import os
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from ultraep.errors import BackendUnavailable, FileError

MAJOR = 5
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # tensor by tensor, not all of a block at once
}
INSTALL = "pip install 'ultraep[transformers]'"
LONGEST = 300  # characters of an error that are shown


def transformers(part: str = "") -> Any:
    """Import the library or a part of it; silent and offline."""
    os.environ.update(SETTINGS)
    try:
        library = import_module("transformers")
        module = import_module(f"transformers.{part}") if part else library
    except ImportError as error:
        raise BackendUnavailable(
            f"ultraep inspect needs transformers ({error}): {INSTALL}"
        ) from None
    if int(library.__version__.split(".")[0]) != MAJOR:
        raise BackendUnavailable(
            f"ultraep inspect needs transformers {MAJOR}, this is {library.__version__}: {INSTALL}"
        )
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return module


def built(config: Any, dtype: Any) -> Any:
    """A model of that configuration, with its head where it has one: weights have its names."""
    library = transformers()
    has_head = type(config) in library.AutoModelForCausalLM._model_mapping
    auto = library.AutoModelForCausalLM if has_head else library.AutoModel
    return auto.from_config(config, dtype=dtype).eval()


class Understood:
    """Turns an error that a library raises on a user's file into one `FileError`.

    Errors are of any type: tokenizers raises bare Exceptions. What counts is where they come from;
    an error that was raised in this package is a bug and passes.
    failed: what could not be done.
    """

    def __init__(self, path: Path, failed: str) -> None:
        self.path, self.failed = path, failed
        self._warnings = warnings.catch_warnings(action="ignore")

    def __enter__(self) -> None:
        self._warnings.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._warnings.__exit__(kind, error, trace)
        if isinstance(error, Exception) and not _raised_here(trace):
            raise FileError(f"{self.path}: {self.failed}: {one_line(error)}") from None


def _raised_here(trace: TracebackType | None) -> bool:
    """Whether this package raised the error, not a library that it called."""
    *_, (frame, _) = traceback.walk_tb(trace)
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "ultraep"


def one_line(error: BaseException | str) -> str:
    """Return an error in one line: its words, without the traceback that some of them hold."""
    text = str(error).partition("\nException raised from")[0]  # torch appends a C++ traceback
    if "Traceback (most recent call last)" in text:
        text = text.strip().splitlines()[-1]
    words = " ".join(text.split())[:LONGEST]
    return words if isinstance(error, str) else f"{type(error).__name__}: {words}".rstrip(": ")
