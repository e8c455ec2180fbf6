"""A plug-in for vLLM that balances every layer of every prefill batch.

vLLM loads `register` through the entry point `vllm.general_plugins` in each of its processes. The
plug-in does nothing unless a setting is given.

refusals   engines, layers and batches that are not balanced, and why
service    the layers of a model, and what the plug-in reads from vLLM
experts    the balanced layer; it and `service` import vLLM

What SGLang's plug-in needs as well is in `integrations.serving`.
"""

from __future__ import annotations

import logging
import os
from functools import partial

from ultraep.integrations.serving.settings import read_settings
from ultraep.integrations.vllm.refusals import VLLM_LOGGER
from ultraep.supported import VLLM

__all__ = ["register"]


def register() -> None:
    """Replace vLLM's experts by balanced experts; vLLM may call this several times.

    Each layer decides later whether to balance: `--additional-config` is not known here.
    """
    level = logging.WARNING if read_settings(os.environ, None) else logging.DEBUG
    log = partial(logging.getLogger(VLLM_LOGGER).log, level)
    try:
        VLLM.check(warn=log)
        from ultraep.integrations.vllm.experts import install  # imports vLLM

        install()
    except ImportError as problem:  # the server starts without balancing
        log("ultraep: no MoE layer balanced: %s", problem)
