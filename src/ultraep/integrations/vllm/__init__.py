"""A plug-in for vLLM: every layer of every prefill batch is balanced, without a fork.

vLLM finds `register` by its entry point `vllm.general_plugins` and calls it in each of its
processes. Settings are in `settings`; nothing happens unless one of them is given.

settings   what a user asks for, in the environment or by --additional-config
refusals   what is not balanced, and why
cost       from how many tokens a batch is balanced
counters   numbers for operators, on the page of metrics
service    what all layers of a model share
experts    the layer itself; it and `service` import vLLM
"""

from __future__ import annotations

import logging
import os

from ultraep.errors import BackendUnavailable
from ultraep.integrations.library import VLLM, VLLM_LOGGER
from ultraep.integrations.vllm.settings import read_settings

__all__ = ["register"]


def register() -> None:
    """Put balanced experts in the place of vLLM's own; called by vLLM, also several times.

    A layer learns later whether they are wanted: `--additional-config` is not known here.
    """
    asked = read_settings(os.environ, None)
    try:
        VLLM.check()
    except BackendUnavailable as problem:  # a server goes on without us
        level = logging.WARNING if asked else logging.DEBUG
        logging.getLogger(VLLM_LOGGER).log(level, "ultraep balances nothing: %s", problem)
        return
    from ultraep.integrations.vllm.experts import install  # vLLM, and torch

    install()
