"""A plug-in for SGLang that balances every layer of every prefill batch.

SGLang loads `register` through the entry point `sglang.srt.plugins` in each of its processes. The
plug-in does nothing unless a setting is given.

refusals   servers and layers that are not balanced, and why
service    the layers of a model, and what the plug-in reads from SGLang
experts    the balanced layer; it and `service` import SGLang

What vLLM's plug-in needs as well is in `integrations.serving`.
"""

from __future__ import annotations

import logging
import os

from ultraep.errors import ConfigError
from ultraep.integrations.serving.settings import read_settings
from ultraep.integrations.sglang.refusals import SGLANG_LOGGER
from ultraep.supported import SGLANG

__all__ = ["register"]


def register() -> None:
    """Replace SGLang's experts by balanced experts, if a setting is given.

    SGLang logs exceptions of a plug-in and starts all the same, so an invalid setting exits.
    """
    log = logging.getLogger(SGLANG_LOGGER).warning
    try:
        if read_settings(os.environ) is None:
            return
        SGLANG.check(warn=log)
        from ultraep.integrations.sglang.experts import install  # imports SGLang

        install()
    except ConfigError as problem:
        raise SystemExit(f"ultraep: {problem}") from None
    except ImportError as problem:  # the server starts without balancing
        log("ultraep: no MoE layer balanced: %s", problem)
