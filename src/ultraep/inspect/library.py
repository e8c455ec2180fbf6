"""Import transformers when it is needed, keep it off the network, and turn its errors into ours."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from ultraep.errors import BackendUnavailable, FileError, UltraEPError

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
    """The library or a part of it; silent, and told not to ask any hub."""
    os.environ.update(SETTINGS)
    try:
        library = import_module("transformers")
        found = import_module(f"transformers.{part}") if part else library
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
    return found


def built(config: Any, dtype: Any) -> Any:
    """A model of that configuration, with its head where it has one: weights have its names."""
    library = transformers()
    known = type(config) in library.AutoModelForCausalLM._model_mapping
    auto = library.AutoModelForCausalLM if known else library.AutoModel
    return auto.from_config(config, dtype=dtype).eval()


@contextmanager
def understood(path: Path, failed: str) -> Iterator[None]:
    """Turn an error of transformers on a user's file into one `FileError`.

    failed: what could not be done.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UltraEPError:
        raise
    except Exception as error:  # noqa: BLE001  tokenizers raises bare Exceptions
        raise FileError(f"{path}: {failed}: {one_line(error)}") from None


def one_line(error: BaseException | str) -> str:
    """Return an error in one line: its words, without the traceback that some of them hold."""
    text = str(error).partition("\nException raised from")[0]  # torch appends a C++ traceback
    if "Traceback (most recent call last)" in text:
        text = text.strip().splitlines()[-1]
    words = " ".join(text.split())[:LONGEST]
    return words if isinstance(error, str) else f"{type(error).__name__}: {words}".rstrip(": ")
