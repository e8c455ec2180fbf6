"""transformers, imported when it is asked for, and kept off the network."""

from __future__ import annotations

import os
from typing import Any

from ultraep.errors import BackendUnavailable

MAJOR = 5
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
INSTALL = "pip install 'ultraep[transformers]'"


def transformers() -> Any:
    """The library, silent, and told not to ask any hub."""
    os.environ.update(OFFLINE)
    try:
        import transformers as library
        from transformers.utils import logging
    except ImportError as error:
        raise BackendUnavailable(
            f"ultraep inspect needs transformers ({error}): {INSTALL}"
        ) from None
    if int(library.__version__.split(".")[0]) != MAJOR:
        raise BackendUnavailable(
            f"ultraep inspect needs transformers {MAJOR}, this is {library.__version__}: {INSTALL}"
        )
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return library


def built(config: Any, dtype: Any) -> Any:
    """A model of that configuration, with its head where it has one: weights have its names."""
    library = transformers()
    known = type(config) in library.AutoModelForCausalLM._model_mapping
    auto = library.AutoModelForCausalLM if known else library.AutoModel
    return auto.from_config(config, dtype=dtype).eval()
