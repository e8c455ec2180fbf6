"""transformers, imported when it is asked for, and kept off the network."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from ultraep.errors import BackendUnavailable

MAJOR = 5
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # tensor by tensor, not all of a block at once
}
INSTALL = "pip install 'ultraep[transformers]'"


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
